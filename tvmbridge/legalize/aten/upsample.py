"""Loops for interpolation: each element reads one neighbour, or four with fixed weights.

The positions and weights are computed at compile time, by ATen's formulas in ATen's precision
(``aten/src/ATen/native/UpSample.h``). The loops read them from tables.
"""

from __future__ import annotations

import torch
from tvm import relax, te, tirx
from tvm.ir import Call, Expr, GenericConst

from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.broadcast import INJECTIVE, shape_of
from tvmbridge.legalize.reductions import static_shape


def _table(values: torch.Tensor) -> GenericConst:
    return relax.const(values.numpy(), str(values.dtype).removeprefix("torch."))


def _step(size: int, result: int, corners: bool, factor: float | None) -> torch.Tensor:
    """Return the distance in the input between neighbours of the result."""
    if corners:
        return torch.tensor(float(size - 1), dtype=torch.float64) / max(result - 1, 1)
    if factor is not None and factor > 0:
        return torch.tensor(1.0 / factor, dtype=torch.float64)
    return torch.tensor(float(size), dtype=torch.float64) / result


def _nearest(size: int, result: int, factor: float | None, dtype: torch.dtype) -> list[Expr]:
    """Return a table of the input index for each result index, computed by PyTorch's kernel."""
    numbers = torch.arange(size, dtype=dtype).view(1, 1, size, 1)
    factors = [factor, 1.0] if factor is not None else None
    sizes = None if factors else [result, 1]
    found = torch.ops.aten.upsample_nearest2d.vec(numbers, sizes, factors)
    return [_table(found.view(result).to(torch.int32))]


def _linear(
    size: int, result: int, corners: bool, factor: float | None, dtype: torch.dtype
) -> list[Expr]:
    """Return tables of the neighbours before and after, and of the weight of the second one."""
    places = torch.arange(result, dtype=dtype)
    step = _step(size, result, corners, factor).to(dtype)
    if size == result:
        real = places
    elif corners:
        real = places * step
    else:
        real = ((places + 0.5) * step - 0.5).clamp_min(0)
    first = real.to(torch.int32).clamp_max(size - 1)
    second = (first + 1).clamp_max(size - 1) if size != result else first
    return [_table(first), _table(second), _table((real - first).clamp(0, 1))]


def _upsample(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    x = arguments["input"]
    shape = shape_of(call)
    sizes = shape_of(x)[2:]
    factors = arguments["scale_factors"] or [None, None]
    dtype = getattr(torch, str(x.ty.dtype.dtype))
    linear = "bilinear" in arguments.op
    tables: list[Expr] = []
    for size, result, factor in zip(sizes, shape[2:], factors, strict=True):
        if linear:
            corners = bool(arguments["align_corners"])
            tables += _linear(size, result, corners, factor, dtype)
        else:
            tables += _nearest(size, result, factor, dtype)

    def compute(source: te.Tensor, *where: te.Tensor) -> te.Tensor:
        return _interpolated(source, where) if linear else _repeated(source, where)

    name = "upsample_bilinear" if linear else "upsample_nearest"
    attrs = {"op_pattern": INJECTIVE}
    return bb.call_te(compute, x, *tables, primfunc_name_hint=name, primfunc_attrs=attrs)


def _repeated(x: te.Tensor, where: tuple[te.Tensor, ...]) -> te.Tensor:
    rows, columns = where
    shape = [*static_shape(x)[:2], *static_shape(rows), *static_shape(columns)]
    return te.compute(
        shape, lambda n, c, i, j: x(n, c, _at(rows, i), _at(columns, j)), name="T_upsample"
    )


def _interpolated(x: te.Tensor, where: tuple[te.Tensor, ...]) -> te.Tensor:
    above, below, down, left, right, across = where
    shape = [*static_shape(x)[:2], *static_shape(above), *static_shape(left)]
    one = tirx.const(1.0, str(x.dtype))

    def element(n: Expr, c: Expr, i: Expr, j: Expr) -> Expr:
        def between(row: te.Tensor) -> Expr:
            first, second = (x(n, c, _at(row, i), _at(side, j)) for side in (left, right))
            return (one - across(j)) * first + across(j) * second

        return (one - down(i)) * between(above) + down(i) * between(below)

    return te.compute(shape, element, name="T_upsample")


def _at(table: te.Tensor, index: Expr) -> Expr:
    return tirx.Cast("int64", table(index))


UPSAMPLE: dict[str, Compile] = {
    "aten.upsample_nearest2d.vec": _upsample,
    "aten.upsample_bilinear2d.vec": _upsample,
}

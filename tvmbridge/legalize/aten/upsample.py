"""Loops for interpolation: each element reads one neighbour, or four with fixed weights.

The positions and weights follow from ATen's formulas in ATen's precision
(``aten/src/ATen/native/UpSample.h``). They are computed at compile time, and the loops read them
from tables. Code for any size has no tables: its loops compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tvm import relax, te, tirx
from tvm.ir import Call, Expr, GenericConst

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.broadcast import INJECTIVE, shape_of
from tvmbridge.legalize.lets import constant

# Return a position in the input, or a weight, for an index of the result.
_Of: TypeAlias = Callable[[Expr], Expr]


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


def _is_times(result: int, factor: int, size: int) -> Expr:
    """Return whether ``result`` is ``factor`` times ``size``, compared when the code runs.

    It may be so at some sizes of a call alone.
    """
    whole, other = (opaque(constant(n, "int64")) for n in (factor * size, result))
    # TVM knows that a number equals itself, also if it is reinterpreted as often.
    return tirx.EQ(opaque(whole), other)


def _nearest_of(size: int, result: int, factor: float | None) -> list[_Of]:
    """Return the function of :func:`_nearest`, which ATen computes in float32 for any dtype."""
    step = tirx.const(float(_step(size, result, False, factor).to(torch.float32)), "float32")
    last = constant(size - 1, "int64")

    def place(i: Expr) -> Expr:
        i = tirx.Cast("int64", i)
        scaled = opaque(tirx.min(tirx.Cast("int64", tirx.Cast("float32", i) * step), last))
        # ATen leaves the step out at these two sizes, also where a factor gives another step.
        doubled = tirx.Select(_is_times(result, 2, size), i >> constant(1, "int64"), scaled)
        return tirx.Select(_is_times(result, 1, size), i, doubled)

    return [place]


def _linear_of(
    size: int, result: int, corners: bool, factor: float | None, dtype: torch.dtype
) -> list[_Of]:
    """Return the functions of :func:`_linear`."""
    name = str(dtype).removeprefix("torch.")
    zero, half, one = (tirx.const(value, name) for value in (0.0, 0.5, 1.0))
    step = tirx.const(float(_step(size, result, corners, factor).to(dtype)), name)
    last = constant(size - 1, "int64")
    same = _is_times(result, 1, size)

    def real(i: Expr) -> Expr:
        place = tirx.Cast(name, i)
        # Between corners, a single element of the result has no step: 0 times infinity is NaN.
        return tirx.max(place * step if corners else (place + half) * step - half, zero)

    def scaled(i: Expr) -> Expr:
        return opaque(tirx.min(tirx.Cast("int64", real(i)), last))

    def first(i: Expr) -> Expr:
        return tirx.Select(same, tirx.Cast("int64", i), scaled(i))

    def second(i: Expr) -> Expr:
        following = opaque(tirx.min(scaled(i) + 1, last))
        return tirx.Select(same, tirx.Cast("int64", i), following)

    def weight(i: Expr) -> Expr:
        part = tirx.max(tirx.min(real(i) - tirx.Cast(name, scaled(i)), one), zero)
        return tirx.Select(same, zero, part)

    return [first, second, weight]


def _upsample(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    x = arguments["input"]
    shape = shape_of(call)
    factors = arguments["scale_factors"] or [None, None]
    dtype = getattr(torch, str(x.ty.dtype.dtype))
    linear = "bilinear" in arguments.op
    vary = sizes_vary()
    found: list[Any] = []
    for size, result, factor in zip(shape_of(x)[2:], shape[2:], factors, strict=True):
        if linear:
            corners = bool(arguments["align_corners"])
            places = _linear_of if vary else _linear
            found += places(size, result, corners, factor, dtype)
        elif vary:
            found += _nearest_of(size, result, factor)
        else:
            found += _nearest(size, result, factor, dtype)

    def compute(source: te.Tensor, *tables: te.Tensor) -> te.Tensor:
        of = found if vary else [_read(table) for table in tables]
        element = _interpolated(source, of) if linear else _repeated(source, of)
        return te.compute(shape, element, name="T_upsample")

    name = "upsample_bilinear" if linear else "upsample_nearest"
    attrs = {"op_pattern": INJECTIVE}
    tables = [] if vary else found
    return bb.call_te(compute, x, *tables, primfunc_name_hint=name, primfunc_attrs=attrs)


def _read(table: te.Tensor) -> _Of:
    if "int" in str(table.dtype):
        return lambda i: tirx.Cast("int64", table(i))
    return lambda i: table(i)


def _repeated(x: te.Tensor, of: Sequence[_Of]) -> Callable[..., Expr]:
    rows, columns = of
    return lambda n, c, i, j: x(n, c, rows(i), columns(j))


def _interpolated(x: te.Tensor, of: Sequence[_Of]) -> Callable[..., Expr]:
    above, below, down, left, right, across = of
    one = tirx.const(1.0, str(x.dtype))

    def element(n: Expr, c: Expr, i: Expr, j: Expr) -> Expr:
        def between(row: _Of) -> Expr:
            first, second = (x(n, c, row(i), side(j)) for side in (left, right))
            return (one - across(j)) * first + across(j) * second

        return (one - down(i)) * between(above) + down(i) * between(below)

    return element


UPSAMPLE: dict[str, Compile] = {
    "aten.upsample_nearest2d.vec": _upsample,
    "aten.upsample_bilinear2d.vec": _upsample,
}

"""Loops for layer norm and RMS norm that return statistics, and for the backward of both.

Half precisions are computed in float32. The gradients of weight and bias are sums over rows.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.lets import Lets, constant
from tvmbridge.legalize.normalizations import te_norm
from tvmbridge.legalize.reductions import accumulator_dtype, cast, mean_of, plain_sum

_ZERO = constant(0, "int64")


def _norm(bb: relax.BlockBuilder, call: Call, arguments: Arguments, *, centered: bool) -> Expr:
    """Write a layer norm, or an RMS norm if not ``centered``, and its statistics."""
    has = [name for name in ("weight", "bias") if arguments.values.get(name) is not None]
    operands = [_rows(bb, arguments["input"], arguments), *[_flat(bb, arguments[n]) for n in has]]

    def compute(x: te.Tensor, *given: te.Tensor) -> list[te.Tensor]:
        parameters = dict(zip(has, given, strict=True))
        epsilon = arguments["eps"]
        if epsilon is None:
            epsilon = np.finfo(accumulator_dtype(str(x.dtype))).eps
        pair = (parameters.get("weight"), parameters.get("bias"))
        results = te_norm(x, pair, _last(x), float(epsilon), centered=centered)
        return [r for r in results if r is not None]

    read = arguments.results or ((0, 1, 2) if centered else (0, 1))
    return _emitted(bb, call, [read], "layer_norm" if centered else "rms_norm", compute, operands)


def _norm_backward(
    bb: relax.BlockBuilder, call: Call, arguments: Arguments, *, centered: bool
) -> Expr:
    """Write the gradients of a layer norm, or of an RMS norm if not ``centered``."""
    names = ("grad_out", "input", *(["mean"] if centered else []), "rstd")
    weights = [] if arguments["weight"] is None else [_flat(bb, arguments["weight"])]
    operands = [*[_rows(bb, arguments[name], arguments) for name in names], *weights]

    def compute(dy: te.Tensor, x: te.Tensor, *rest: te.Tensor) -> list[te.Tensor]:
        mean, inverse, *weight = rest if centered else (None, *rest)
        gradients = _gradients(dy, x, mean, inverse, tuple(weight))
        return gradients if centered else gradients[:2]

    name = "layer_norm_backward" if centered else "rms_norm_backward"
    return _emitted(bb, call, _alone(arguments), name, compute, operands)


def _gradients(
    dy: te.Tensor,
    x: te.Tensor,
    mean: te.Tensor | None,
    inverse: te.Tensor,
    weight: tuple[te.Tensor, ...],
) -> list[te.Tensor]:
    """Return the gradients of x, weight and bias; ``mean`` is None for an RMS norm."""
    dtype = str(x.dtype)
    acc = accumulator_dtype(dtype)

    def normal(*at: Expr) -> Expr:
        value = tirx.Cast(acc, x(*at))
        return (value if mean is None else value - _of_row(mean, at)) * _of_row(inverse, at)

    def scaled(*at: Expr) -> Expr:
        value = tirx.Cast(acc, dy(*at))
        return value * tirx.Cast(acc, weight[0](at[-1])) if weight else value

    def product(*at: Expr) -> Expr:
        return scaled(*at) * normal(*at)

    def of_weight(*at: Expr) -> Expr:
        return tirx.Cast(acc, dy(*at)) * normal(*at)

    slope = te.compute(x.shape, scaled, name="T_scaled")
    flat_part = None if mean is None else mean_of(slope, _last(x), True)
    tilted = mean_of(te.compute(x.shape, product, name="T_product"), _last(x), True)

    def element(*at: Expr) -> Expr:
        lets = Lets()
        level = slope(*at)
        if flat_part is not None:
            level = lets.bind(level - _of_row(flat_part, at), "level")
        tilt = lets.bind(normal(*at) * _of_row(tilted, at), "tilt")
        return lets.close(tirx.Cast(dtype, (level - tilt) * _of_row(inverse, at)))

    outer = list(range(len(x.shape) - 1))
    grad_x = te.compute(x.shape, element, name="T_layer_norm_backward")
    grad_weight = plain_sum(te.compute(x.shape, of_weight, name="T_of_weight"), outer, False)
    grad_bias = plain_sum(cast(dy, acc), outer, False)
    return [grad_x, grad_weight, grad_bias]


def _rows(bb: relax.BlockBuilder, x: Expr, arguments: Arguments) -> Expr:
    """Return ``x`` with one dimension in place of the normalized ones, and at least one before."""
    shape = shape_of(x)
    outer = shape[: len(shape) - len(arguments["normalized_shape"])] or (1,)
    rows = (*outer, prod(shape) // prod(outer) if prod(outer) else 0)
    return x if rows == tuple(shape) else bb.emit(relax.op.reshape(x, rows))


def _flat(bb: relax.BlockBuilder, x: Expr) -> Expr:
    """Return ``x`` as a vector."""
    shape = (prod(shape_of(x)),)
    return x if shape == tuple(shape_of(x)) else bb.emit(relax.op.reshape(x, shape))


def _last(x: te.Tensor) -> list[int]:
    return [len(x.shape) - 1]


def _of_row(scalars: te.Tensor, at: tuple[Expr, ...]) -> Expr:
    """Return the scalar of the row that holds the position ``at``."""
    return scalars(*at[:-1], _ZERO)


def _dtype(type_: relax.TensorType) -> str:
    """Return the dtype of a tensor's type."""
    return str(type_.dtype.dtype)


def _alone(arguments: Arguments) -> list[tuple[int, ...]]:
    """Return the gradients that are read, each alone: they are different loops over the rows."""
    return [(number,) for number in arguments.results or (0, 1, 2)]


def _emitted(
    bb: relax.BlockBuilder,
    call: Call,
    groups: list[tuple[int, ...]],
    name: str,
    compute: Any,
    operands: list[Expr],
) -> Expr:
    """Emit the results of ``compute`` that ``call`` returns, in their shapes.

    ``groups`` are the numbers of the results that one function computes.
    """
    declared = iter(call.ty.fields)
    results = []
    for group in groups:
        types = [next(declared) for _ in group]

        def chosen(
            *tensors: te.Tensor, group: tuple[int, ...] = group, types: Any = types
        ) -> list[te.Tensor]:
            computed = compute(*tensors)
            return [cast(computed[n], _dtype(t)) for n, t in zip(group, types, strict=True)]

        made = bb.emit(bb.call_te(chosen, *operands, primfunc_name_hint=name))
        several = len(group) > 1
        fields = [
            bb.emit(relax.TupleGetItem(made, i)) if several else made for i in range(len(group))
        ]
        results += [_shaped(bb, field, type_) for field, type_ in zip(fields, types, strict=True)]
    return relax.Tuple(results)


def _shaped(bb: relax.BlockBuilder, x: Expr, type_: relax.TensorType) -> Expr:
    shape = list(type_.shape.values)
    return x if list(x.ty.shape.values) == shape else bb.emit(relax.op.reshape(x, shape))


NORMS: dict[str, Compile] = {
    "aten.native_layer_norm.default": partial(_norm, centered=True),
    "aten.native_layer_norm_backward.default": partial(_norm_backward, centered=True),
    "aten._fused_rms_norm.default": partial(_norm, centered=False),
    "aten._fused_rms_norm_backward.default": partial(_norm_backward, centered=False),
}

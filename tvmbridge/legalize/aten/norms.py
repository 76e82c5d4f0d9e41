"""Loops for layer norm and RMS norm that return statistics, and for the backward of both.

Half precisions are computed in float32. The gradients of weight and bias are sums over rows.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.functions import FUNCTIONS
from tvmbridge.legalize.lets import Lets, constant
from tvmbridge.legalize.reductions import (
    accumulator_dtype,
    cast,
    mean_of,
    plain_sum,
    variance_of,
)

_ZERO = constant(0, "int64")


def _layer_norm(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    x, epsilon = arguments["input"], float(arguments["eps"])
    columns = prod(arguments["normalized_shape"])
    flat = _flat(bb, x, columns)
    parameters = [p for p in (arguments["weight"], arguments["bias"]) if p is not None]
    has = [arguments[name] is not None for name in ("weight", "bias")]

    def compute(x: te.Tensor, *given: te.Tensor) -> list[te.Tensor]:
        left = iter(given)
        weight, bias = (next(left) if there else None for there in has)
        acc = accumulator_dtype(str(x.dtype))
        wide = cast(x, acc)
        mean = mean_of(wide, [1], True)
        var = variance_of(wide, mean, [1], True)
        inverse = te.compute(
            var.shape,
            lambda *i: FUNCTIONS["rsqrt"](var(*i) + constant(epsilon, acc)),
            name="T_rsqrt",
        )

        def element(row: Expr, column: Expr) -> Expr:
            value = (wide(row, column) - mean(row, _ZERO)) * inverse(row, _ZERO)
            if weight is not None:
                value = value * tirx.Cast(acc, weight(column))
            if bias is not None:
                value = value + tirx.Cast(acc, bias(column))
            return tirx.Cast(str(x.dtype), value)

        return [te.compute(x.shape, element, name="T_layer_norm"), mean, inverse]

    operands = [flat, *[_flat(bb, p) for p in parameters]]
    return _emitted(bb, call, arguments, "layer_norm", compute, operands)


def _layer_norm_backward(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    columns = prod(arguments["normalized_shape"])
    rows = [_flat(bb, arguments[name], columns) for name in ("grad_out", "input")]
    statistics = [_flat(bb, arguments[name], 1) for name in ("mean", "rstd")]
    weights = [] if arguments["weight"] is None else [_flat(bb, arguments["weight"])]

    def compute(
        dy: te.Tensor, x: te.Tensor, mean: te.Tensor, inverse: te.Tensor, *weight: te.Tensor
    ) -> list[te.Tensor]:
        return _gradients(dy, x, mean, inverse, weight)

    operands = [*rows, *statistics, *weights]
    return _emitted(bb, call, arguments, "layer_norm_backward", compute, operands)


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

    def normal(row: Expr, column: Expr) -> Expr:
        value = tirx.Cast(acc, x(row, column))
        return (value if mean is None else value - mean(row, _ZERO)) * inverse(row, _ZERO)

    def scaled(row: Expr, column: Expr) -> Expr:
        value = tirx.Cast(acc, dy(row, column))
        return value * tirx.Cast(acc, weight[0](column)) if weight else value

    def product(row: Expr, column: Expr) -> Expr:
        return scaled(row, column) * normal(row, column)

    def of_weight(row: Expr, column: Expr) -> Expr:
        return tirx.Cast(acc, dy(row, column)) * normal(row, column)

    slope = te.compute(x.shape, scaled, name="T_scaled")
    flat_part = None if mean is None else mean_of(slope, [1], True)
    tilted = mean_of(te.compute(x.shape, product, name="T_product"), [1], True)

    def element(row: Expr, column: Expr) -> Expr:
        lets = Lets()
        level = slope(row, column)
        if flat_part is not None:
            level = lets.bind(level - flat_part(row, _ZERO), "level")
        tilt = lets.bind(normal(row, column) * tilted(row, _ZERO), "tilt")
        return lets.close(tirx.Cast(dtype, (level - tilt) * inverse(row, _ZERO)))

    grad_x = te.compute(x.shape, element, name="T_layer_norm_backward")
    grad_weight = plain_sum(te.compute(x.shape, of_weight, name="T_of_weight"), [0], False)
    grad_bias = plain_sum(cast(dy, acc), [0], False)
    return [grad_x, grad_weight, grad_bias]


def _rms_norm(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    columns = prod(arguments["normalized_shape"])
    x, weight = arguments["input"], arguments["weight"]
    operands = [_flat(bb, x, columns), *([] if weight is None else [_flat(bb, weight)])]

    def compute(x: te.Tensor, *weight: te.Tensor) -> list[te.Tensor]:
        acc = accumulator_dtype(str(x.dtype))
        epsilon = arguments["eps"]
        epsilon = float(np.finfo(acc).eps if epsilon is None else epsilon)
        wide = cast(x, acc)
        square = te.compute(x.shape, lambda *i: wide(*i) * wide(*i), name="T_square")
        mean = mean_of(square, [1], True)
        inverse = te.compute(
            mean.shape,
            lambda *i: FUNCTIONS["rsqrt"](mean(*i) + constant(epsilon, acc)),
            name="T_rsqrt",
        )

        def element(row: Expr, column: Expr) -> Expr:
            value = wide(row, column) * inverse(row, _ZERO)
            if weight:
                value = value * tirx.Cast(acc, weight[0](column))
            return tirx.Cast(str(x.dtype), value)

        return [te.compute(x.shape, element, name="T_rms_norm"), inverse]

    return _emitted(bb, call, arguments, "rms_norm", compute, operands)


def _rms_norm_backward(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    columns = prod(arguments["normalized_shape"])
    rows = [_flat(bb, arguments[name], columns) for name in ("grad_out", "input")]
    weights = [] if arguments["weight"] is None else [_flat(bb, arguments["weight"])]
    operands = [*rows, _flat(bb, arguments["rstd"], 1), *weights]

    def compute(
        dy: te.Tensor, x: te.Tensor, inverse: te.Tensor, *weight: te.Tensor
    ) -> list[te.Tensor]:
        return _gradients(dy, x, None, inverse, weight)[:2]

    return _emitted(bb, call, arguments, "rms_norm_backward", compute, operands)


def _flat(bb: relax.BlockBuilder, x: Expr, columns: int | None = None) -> Expr:
    """Return ``x`` as a matrix of ``columns`` columns; as a vector if that is None."""
    count = prod(shape_of(x))
    shape = (count,) if columns is None else (count // columns, columns)
    return bb.emit(relax.op.reshape(x, shape))


def _dtype(type_: relax.TensorType) -> str:
    """Return the dtype of a tensor's type."""
    return str(type_.dtype.dtype)


def _emitted(
    bb: relax.BlockBuilder,
    call: Call,
    arguments: Arguments,
    name: str,
    compute: Any,
    operands: list[Expr],
) -> Expr:
    """Emit the results of ``compute`` that ``call`` returns, in their shapes."""
    read = arguments.results or (0, 1, 2)

    declared = list(call.ty.fields)

    def chosen(*tensors: te.Tensor) -> list[te.Tensor]:
        results = compute(*tensors)
        return [cast(results[n], _dtype(t)) for n, t in zip(read, declared, strict=True)]

    made = bb.emit(bb.call_te(chosen, *operands, primfunc_name_hint=name))
    several = len(read) > 1
    fields = [bb.emit(relax.TupleGetItem(made, i)) if several else made for i in range(len(read))]
    return relax.Tuple(
        [
            bb.emit(relax.op.reshape(field, list(type_.shape.values)))
            for field, type_ in zip(fields, declared, strict=True)
        ]
    )


NORMS: dict[str, Compile] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
}

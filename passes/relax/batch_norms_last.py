"""Batch norms in training of images with channels last become kernels of our own.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", batch_norm, x, weight, bias, mean, variance)
    y, new_mean, new_variance = lv[0], lv[1], lv[2]             # x: (8, 28, 28, 48)

After::

    rows = R.reshape(x, (6272, 48))
    lv = R.call_tir(channel_statistics, (rows, mean, variance), out_ty=[four vectors of 48])
    y = (x - lv[0]) * (lv[1] * weight) + bias
    new_mean, new_variance = lv[2], lv[3]

In the same way backward becomes one call for the gradients of weight and bias, and elementary
operators for the gradient of ``x``. So the activations behind a norm and before its gradient are
computed with it. Everything is computed in float32.

Requires: static shapes. Guarantees: norms with channels second, in evaluation, and in float64 are
untouched. Runs after: ChannelsLast, the split. Runs before: LegalizeOps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import relax
from tvm.relax import op

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.kernels.aten_call import aten_call_operator, spec_of, tensors_of
from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls, shape_of
from tvmbridge.schedules.gpu.channel_sums import channel_gradients, channel_statistics

_DTYPES = ("float16", "bfloat16", "float32")
_FLOAT = "float32"

# Returns the results of a norm by their numbers.
Rule: TypeAlias = Callable[["_Emitter", Arguments], list[relax.Expr]]


@dataclass(frozen=True)
class BatchNormsLast(RelaxPass):
    """Replace batch norms in training, and their backward, where images have channels last."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            rule = _RULES.get(aten_call_operator(call) or "")
            if rule is None or not spec_of(call).get("channels_last"):
                return call
            call = builder.normalize(call)
            arguments, emitter = Arguments.of(spec_of(call), tensors_of(call)), _Emitter(builder)
            if not _is_served(arguments):
                return call
            report.rewrote()
            results = rule(emitter, arguments)
            numbers = arguments.results or range(len(results))
            typed = zip(numbers, call.ty.fields, strict=True)
            return relax.Tuple([emitter.cast(results[n], t.dtype.dtype) for n, t in typed])

        return mod if sizes_vary() else map_calls(mod, rewrite, report)


def _is_served(arguments: Arguments) -> bool:
    trains = arguments.values.get("training", arguments.values.get("train"))
    shape, dtype = shape_of(arguments["input"]), dtype_of(arguments["input"])
    return trains is True and shape is not None and dtype in _DTYPES and math.prod(shape[:-1]) > 1


@dataclass(frozen=True)
class _Emitter:
    """Emits operators in float32 by ``builder``."""

    builder: relax.BlockBuilder

    def cast(self, value: Any, dtype: Any = _FLOAT) -> relax.Expr:
        """Return ``value`` in ``dtype``."""
        same = dtype_of(value) == str(dtype)
        return value if same else self.builder.emit(op.astype(value, str(dtype)))

    def do(self, operator: Callable[..., relax.Expr], *operands: relax.Expr) -> relax.Expr:
        """Emit an operator."""
        return self.builder.emit(operator(*operands))

    def rows(self, image: relax.Expr) -> relax.Expr:
        """Return the matrix of an image's pixels and channels."""
        shape = shape_of(image) or ()
        return self.do(op.reshape, image, (math.prod(shape[:-1]), shape[-1]))

    def kernel(self, function: tvm.tirx.PrimFunc, name: str, *given: relax.Expr) -> list[Any]:
        """Emit the call of a kernel that returns vectors of the channels; return the vectors."""
        channels = (shape_of(given[0]) or ())[-1]
        types = [relax.TensorType([channels], _FLOAT)] * (len(function.params) - len(given))
        called = relax.call_tir(self.builder.add_func(function, name), list(given), types)
        found = self.builder.emit(called)
        return [self.builder.emit(relax.TupleGetItem(found, i)) for i in range(len(types))]


def _norm(emitter: _Emitter, arguments: Arguments) -> list[relax.Expr]:
    x, do = arguments["input"], emitter.do
    rows = emitter.rows(x)
    count, channels = shape_of(rows) or ()
    names = [n for n in ("running_mean", "running_var") if arguments.values.get(n) is not None]
    old = [emitter.cast(arguments[name]) for name in names]
    momentum = float(arguments["momentum"]) if old else None
    eps = float(arguments["eps"])
    function = channel_statistics(count, channels, dtype_of(x), eps, momentum)
    mean, inverse, *new = emitter.kernel(function, "channel_statistics", rows, *old)
    scale = _times_weight(emitter, inverse, arguments)
    y = do(op.multiply, do(op.subtract, emitter.cast(x), mean), scale)
    if arguments["bias"] is not None:
        y = do(op.add, y, emitter.cast(arguments["bias"]))
    return [y, mean, inverse, *new]


def _backward(emitter: _Emitter, arguments: Arguments) -> list[relax.Expr]:
    grad, x, do = arguments["grad_out"], arguments["input"], emitter.do
    mean, inverse = (emitter.cast(arguments[name]) for name in ("save_mean", "save_invstd"))
    rows = [emitter.rows(image) for image in (grad, x)]
    count, channels = shape_of(rows[0]) or ()
    function = channel_gradients(count, channels, (dtype_of(grad), dtype_of(x)))
    of_bias, of_weight = emitter.kernel(function, "channel_gradients", *rows, mean, inverse)
    share = relax.const(1 / count, _FLOAT)
    level = do(op.multiply, of_bias, share)
    slope = do(op.multiply, do(op.multiply, of_weight, share), inverse)
    tilt = do(op.multiply, do(op.subtract, emitter.cast(x), mean), slope)
    left = do(op.subtract, do(op.subtract, emitter.cast(grad), level), tilt)
    of_x = do(op.multiply, left, _times_weight(emitter, inverse, arguments))
    return [of_x, of_weight, of_bias]


def _times_weight(emitter: _Emitter, inverse: relax.Expr, arguments: Arguments) -> relax.Expr:
    weight = arguments["weight"]
    return inverse if weight is None else emitter.do(op.multiply, inverse, emitter.cast(weight))


_RULES: dict[str, Rule] = {
    "aten._native_batch_norm_legit_functional.default": _norm,
    "aten._native_batch_norm_legit.no_stats": _norm,
    "aten.native_batch_norm_backward.default": _backward,
}

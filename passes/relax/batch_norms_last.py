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
from typing import TypeAlias

import tvm
from tvm import relax
from tvm.relax import op

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.kernels.aten_call import aten_call_operator, spec_of, tensors_of
from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls, shape_of
from tvmbridge.passes.relax.normalizations import Formulas
from tvmbridge.schedules.gpu.channel_sums import channel_gradients, channel_statistics

_DTYPES = ("float16", "bfloat16", "float32")
_FLOAT = "float32"

# Returns the results of a norm by their numbers.
Rule: TypeAlias = Callable[[Formulas, Arguments], list[relax.Expr]]


@dataclass(frozen=True)
class BatchNormsLast(RelaxPass):
    """Replace batch norms in training, and their backward, where images have channels last."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            rule = _RULES.get(aten_call_operator(call) or "")
            if rule is None or not spec_of(call).get("channels_last"):
                return call
            call = builder.normalize(call)
            arguments, formulas = Arguments.of(spec_of(call), tensors_of(call)), Formulas(builder)
            if not _is_served(arguments):
                return call
            report.rewrote()
            results = rule(formulas, arguments)
            numbers = arguments.results or range(len(results))
            typed = zip(numbers, call.ty.fields, strict=True)
            return relax.Tuple([formulas.cast(results[n], str(t.dtype.dtype)) for n, t in typed])

        return mod if sizes_vary() else map_calls(mod, rewrite, report)


def _is_served(arguments: Arguments) -> bool:
    trains = arguments.values.get("training", arguments.values.get("train"))
    shape, dtype = shape_of(arguments["input"]), dtype_of(arguments["input"])
    return trains is True and shape is not None and dtype in _DTYPES and math.prod(shape[:-1]) > 1


def _rows(formulas: Formulas, image: relax.Expr) -> relax.Expr:
    """Return the matrix of an image's pixels and channels."""
    shape = shape_of(image) or ()
    return formulas.emit(op.reshape(image, (math.prod(shape[:-1]), shape[-1])))


def _vectors(
    formulas: Formulas, function: tvm.tirx.PrimFunc, name: str, *given: relax.Expr
) -> list[relax.Var]:
    """Emit the call of a kernel that returns vectors of the channels; return the vectors."""
    channels = (shape_of(given[0]) or ())[-1]
    types = [relax.TensorType([channels], _FLOAT)] * (len(function.params) - len(given))
    kernel = formulas.builder.add_func(function, name)
    found = formulas.emit(relax.call_tir(kernel, list(given), types))
    return [formulas.emit(relax.TupleGetItem(found, i)) for i in range(len(types))]


def _norm(formulas: Formulas, arguments: Arguments) -> list[relax.Expr]:
    x, emit = arguments["input"], formulas.emit
    rows = _rows(formulas, x)
    count, channels = shape_of(rows) or ()
    names = [n for n in ("running_mean", "running_var") if arguments.values.get(n) is not None]
    old = [formulas.cast(arguments[name], _FLOAT) for name in names]
    momentum = float(arguments["momentum"]) if old else None
    eps = float(arguments["eps"])
    function = channel_statistics(count, channels, dtype_of(x), eps, momentum)
    mean, inverse, *new = _vectors(formulas, function, "channel_statistics", rows, *old)
    scale = formulas.affine(inverse, arguments["weight"], None)
    centered = emit(op.subtract(formulas.wide(x), mean))
    return [formulas.affine(centered, scale, arguments["bias"]), mean, inverse, *new]


def _backward(formulas: Formulas, arguments: Arguments) -> list[relax.Expr]:
    grad, x, emit = arguments["grad_out"], arguments["input"], formulas.emit
    saved = [arguments[name] for name in ("save_mean", "save_invstd")]
    mean, inverse = (formulas.cast(value, _FLOAT) for value in saved)
    rows = [_rows(formulas, image) for image in (grad, x)]
    count, channels = shape_of(rows[0]) or ()
    function = channel_gradients(count, channels, (dtype_of(grad), dtype_of(x)))
    of_bias, of_weight = _vectors(formulas, function, "channel_gradients", *rows, mean, inverse)
    share = relax.const(1 / count, _FLOAT)
    level = emit(op.multiply(of_bias, share))
    slope = emit(op.multiply(emit(op.multiply(of_weight, share)), inverse))
    tilt = emit(op.multiply(emit(op.subtract(formulas.wide(x), mean)), slope))
    left = emit(op.subtract(emit(op.subtract(formulas.wide(grad), level)), tilt))
    scale = formulas.affine(inverse, arguments["weight"], None)
    return [emit(op.multiply(left, scale)), of_weight, of_bias]


_RULES: dict[str, Rule] = {
    "aten._native_batch_norm_legit_functional.default": _norm,
    "aten._native_batch_norm_legit.no_stats": _norm,
    "aten.native_batch_norm_backward.default": _backward,
}

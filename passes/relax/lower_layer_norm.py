"""Layer norm spelled out in operators that TVM can differentiate.

Before::

    y = R.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=1e-5)

After::

    mean = R.mean(x, [-1], keepdims=True)
    centered = x - mean
    variance = R.mean(centered * centered, [-1], keepdims=True)
    y = centered * R.rsqrt(variance + 1e-5) * gamma + beta

Requires: static rank, and the last axes (others are declined). Guarantees: no other
``relax.nn.layer_norm`` is left.
Runs before: AppendCotangents. Runs after: the frontend. Training only: in inference the whole
operator has a better schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_functions


@dataclass(frozen=True)
class LowerLayerNorm(RelaxPass):
    """Replace every ``relax.nn.layer_norm`` by its definition."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: _LayerNormMutator(report).visit_expr(f))


@mutator
class _LayerNormMutator(PyExprMutator):
    def __init__(self, report: PassReport) -> None:
        super().__init__()
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.nn.layer_norm"):
            return call
        rank = call.args[0].ty.ndim
        axes = [int(a) % max(rank, 1) for a in call.attrs.axes]
        if axes != list(range(rank - len(axes), rank)):
            self.report.decline("nn.layer_norm", "the axes are not the last ones, in order")
            return call
        self.report.rewrote()
        return self._definition(call, axes)

    def _definition(self, call: relax.Call, axes: list[int]) -> relax.Expr:
        x, gamma, beta = call.args
        attrs = call.attrs
        emit = self.builder_.emit
        mean = emit(relax.op.mean(x, axes, keepdims=True))
        centered = emit(relax.op.subtract(x, mean))
        squares = emit(relax.op.multiply(centered, centered))
        variance = emit(relax.op.mean(squares, axes, keepdims=True))
        shifted = emit(relax.op.add(variance, relax.const(float(attrs.epsilon), dtype_of(x))))
        normed = relax.op.multiply(centered, emit(relax.op.rsqrt(shifted)))
        if attrs.scale:
            normed = relax.op.multiply(emit(normed), gamma)
        if attrs.center:
            normed = relax.op.add(emit(normed), beta)
        return normed

"""Gradients do not flow into operands that depend on no parameter with a wanted gradient.

Before, with the gradient of ``w`` wanted and ``m`` an integer mask::

    lv = R.astype(m, "float32")
    y = R.multiply(w, lv)

After::

    lv = R.astype(m, "float32")
    lv1 = R.grad.no_grad(lv)
    y = R.multiply(w, lv1)

TVM's Gradient follows every operand. It would need gradient rules for operators that only compute
masks and positions, and would pass cotangents to integers. So this pass wraps operands that do not
depend on a wanted parameter through floating-point values; :class:`RemoveNoGrad` unwraps them
afterwards.

Requires: one dataflow block. Runs before: Gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls, map_functions

_NO_GRAD = tvm.ir.Op.get("relax.grad.no_grad")


def is_floating(expr: relax.Expr) -> bool:
    """Whether ``expr`` is a floating-point tensor, or a tuple that holds one."""
    if isinstance(expr.ty, relax.TensorType):
        return dtype_of(expr).startswith(("float", "bfloat"))
    if isinstance(expr.ty, relax.TupleType):
        return any(
            isinstance(f, relax.TensorType) and str(f.dtype).startswith(("float", "bfloat"))
            for f in expr.ty.fields
        )
    return False


def active_variables(function: relax.Function, wanted: list[relax.Var]) -> set[relax.Var]:
    """Return the variables that depend on ``wanted`` through floating-point values."""
    active = set(wanted)
    for block in function.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and value.op == _NO_GRAD:
                continue
            reads = relax.analysis.free_vars(value)
            if is_floating(binding.var) and any(v in active for v in reads):
                active.add(binding.var)
    return active


@dataclass(frozen=True)
class StopGradients(RelaxPass):
    """Wrap operands in ``no_grad`` that depend on no wanted parameter.

    Only operands of calls that also read a variable with a gradient are wrapped.

    Args:
        wanted: names of the parameters whose gradients are wanted.
    """

    wanted: tuple[str, ...]

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            names = set(self.wanted)
            wanted = [p for p in function.params if p.name in names]
            active = active_variables(function, wanted)
            return _Stopper(active, set(function.params), report).visit_expr(function)

        return map_functions(mod, rewrite)


@mutator
class _Stopper(PyExprMutator):
    def __init__(
        self, active: set[relax.Var], parameters: set[relax.Var], report: PassReport
    ) -> None:
        super().__init__()
        self.active = active
        self.parameters = parameters
        self.report = report
        self.stopped: dict[relax.Var, relax.Var] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.op == _NO_GRAD or not any(v in self.active for v in relax.analysis.free_vars(call)):
            return super().visit_call_(call)
        arguments = [self._stop(a) for a in call.args]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)

    def visit_tuple_(self, value: relax.Tuple) -> relax.Expr:
        if not any(v in self.active for v in relax.analysis.free_vars(value)):
            return super().visit_tuple_(value)
        return relax.Tuple([self._stop(f) for f in value.fields])

    def _stop(self, operand: relax.Expr) -> relax.Expr:
        visited = self.visit_expr(operand)
        if not isinstance(operand, relax.Var) or operand in self.active:
            return visited
        if operand in self.parameters or not isinstance(operand.ty, relax.TensorType):
            return visited
        if self._is_stopped(visited):
            return visited
        if operand not in self.stopped:
            self.stopped[operand] = self.builder_.emit(relax.op.grad.no_grad(visited))
            self.report.rewrote()
        return self.stopped[operand]

    def _is_stopped(self, operand: relax.Expr) -> bool:
        value = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        return isinstance(value, relax.Call) and value.op == _NO_GRAD


@dataclass(frozen=True)
class RemoveNoGrad(RelaxPass):
    """Replace ``no_grad(x)`` by ``x``, after TVM's Gradient, which alone needs it."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def unwrapped(call: relax.Call, _: relax.BlockBuilder) -> relax.Expr:
            if call.op != _NO_GRAD:
                return call
            report.rewrote()
            return call.args[0]

        return map_calls(mod, unwrapped)

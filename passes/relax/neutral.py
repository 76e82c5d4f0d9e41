"""The mutator of OneZapp and ZeroZapp, which removes operands that do not change the result."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.core.decisions import simplifies
from tvmbridge.passes.base import PassReport, dtype_of, shape_of
from tvmbridge.passes.relax.constants import uniform_value


@mutator
class NeutralElementMutator(PyExprMutator):
    """Replaces calls with a neutral operand, such as ``x + 0``, by their other operand.

    Args:
        neutral: the number that does not change the result.
        changes: called with a call and the number that fills its operand; says whether the operand
            changes the result although the number equals ``neutral``, as -0.0 equals 0.0.
    """

    def __init__(
        self,
        neutral: float,
        commutative: str,
        one_sided: str,
        report: PassReport,
        changes: Callable[[relax.Call, float], bool] = lambda call, number: False,
    ) -> None:
        super().__init__()
        self.neutral = neutral
        self.commutative = commutative
        self.one_sided = one_sided
        self.report = report
        self.changes = changes

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        before = call
        call = self.builder_.normalize(super().visit_call_(call))
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
            return call
        operand = self._operand_left(call, before)
        if operand is None or dtype_of(operand) != dtype_of(call):
            return call
        target = shape_of(call)
        if target is None:
            self.report.decline(call.op.name, "the shape is not static")
            return call
        self.report.rewrote()
        if shape_of(operand) == target:
            return operand
        return relax.op.broadcast_to(operand, target)

    def _operand_left(self, call: relax.Call, before: relax.Call) -> relax.Expr | None:
        if call.op.name not in (self.commutative, self.one_sided):
            return None
        left, right = call.args
        sides = [(right, left)]
        if call.op.name == self.commutative:
            sides.append((left, right))
        for operand, other in sides:
            number = uniform_value(operand, self.lookup_binding)
            # A number that is computed from sizes, such as a count, may be one at some sizes.
            if simplifies(number == self.neutral and not self.changes(before, number)):
                return other
        return None

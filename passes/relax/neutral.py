"""The mutator that OneZapp and ZeroZapp share: an operand that changes nothing goes away."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import PassReport, dtype_of, shape_of
from tvmbridge.passes.relax.constants import uniform_value


@mutator
class NeutralElementMutator(PyExprMutator):
    """Remove ``neutral`` from both sides of ``commutative``, from the right of ``one_sided``."""

    def __init__(
        self, neutral: float, commutative: str, one_sided: str, report: PassReport
    ) -> None:
        super().__init__()
        self.neutral = neutral
        self.commutative = commutative
        self.one_sided = one_sided
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.builder_.normalize(super().visit_call_(call))
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
            return call
        operand = self._operand_left(call)
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

    def _operand_left(self, call: relax.Call) -> relax.Expr | None:
        if call.op.name not in (self.commutative, self.one_sided):
            return None
        left, right = call.args
        if uniform_value(right, self.lookup_binding) == self.neutral:
            return left
        if call.op.name == self.one_sided:
            return None
        return right if uniform_value(left, self.lookup_binding) == self.neutral else None

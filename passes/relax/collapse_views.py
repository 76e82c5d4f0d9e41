"""A chain of reshapes becomes one reshape, a chain of permutations one permutation, or nothing.

Before::

    a = R.reshape(x, (28, 768))                     # x: (2, 14, 768)
    b = R.reshape(a, (2, 14, 12, 64))
    c = R.permute_dims(b, [0, 2, 1, 3])
    d = R.permute_dims(c, [0, 2, 1, 3])

After::

    b = R.reshape(x, (2, 14, 12, 64))
    c = R.permute_dims(b, [0, 2, 1, 3])
    d = b

``expand_dims`` and ``squeeze`` are reshapes too. Dead code elimination later removes the links of a
chain that nothing reads any more.

Requires: static shapes (others are declined). Guarantees: no reshape of a reshape, no permutation
of a permutation, and no reshape or permutation that changes nothing.
Runs after: ZappLike, whose sums and broadcasts end in reshapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import (
    PERMUTATION,
    RESHAPES,
    PassReport,
    RelaxPass,
    map_functions,
    permutation,
    shape_of,
    with_span,
)


@dataclass(frozen=True)
class CollapseViews(RelaxPass):
    """Let each reshape read the operand of its chain's first reshape; likewise permutations."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: _CollapseMutator(report).visit_expr(f))


@mutator
class _CollapseMutator(PyExprMutator):
    def __init__(self, report: PassReport) -> None:
        super().__init__()
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name not in (*RESHAPES, PERMUTATION):
            return call
        call = self.builder_.normalize(call)
        if shape_of(call) is None or shape_of(call.args[0]) is None:
            self.report.decline(name, "the shape is not static")
            return call
        made = self._permuted(call) if name == PERMUTATION else self._reshaped(call)
        return with_span(made, call.span)

    def _reshaped(self, call: relax.Call) -> relax.Expr:
        source, shape = self._source(call, RESHAPES), shape_of(call)
        if shape_of(source) == shape:
            self.report.rewrote()
            return source
        if source.same_as(call.args[0]):
            return call
        self.report.rewrote()
        return relax.op.reshape(source, shape)

    def _permuted(self, call: relax.Call) -> relax.Expr:
        axes = permutation(call)
        inner = self._producer(call.args[0], (PERMUTATION,))
        if inner is not None:
            axes = [permutation(inner)[axis] for axis in axes]
        source = call.args[0] if inner is None else inner.args[0]
        if axes == list(range(len(axes))):
            self.report.rewrote()
            return source
        if inner is None:
            return call
        self.report.rewrote()
        return relax.op.permute_dims(source, axes)

    def _source(self, call: relax.Call, names: tuple[str, ...]) -> relax.Expr:
        inner = self._producer(call.args[0], names)
        return call.args[0] if inner is None else inner.args[0]

    def _producer(self, operand: relax.Expr, names: tuple[str, ...]) -> relax.Call | None:
        """Return the call that computes ``operand`` if it calls one of ``names``, otherwise None.

        Bindings that only copy a variable are followed. The operand of the call is no such call
        itself, because calls further up have been collapsed already.
        """
        while isinstance(operand, relax.Var):
            bound = self.lookup_binding(operand)
            if bound is None:
                return None
            operand = bound
        if not isinstance(operand, relax.Call) or getattr(operand.op, "name", "") not in names:
            return None
        return operand if shape_of(operand.args[0]) is not None else None

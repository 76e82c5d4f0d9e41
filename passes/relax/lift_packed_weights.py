"""A concatenation of whole parameters becomes a new parameter.

Before::

    def main(x, w_q, w_k):
        w = R.concat((w_q, w_k), axis=0)
        y = R.matmul(x, R.permute_dims(w))

After::

    def main(x, w_q, w_k, packed_0):
        y = R.matmul(x, R.permute_dims(packed_0))

The caller passes the concatenated values, without a copy if the parameters adjoin in memory. So
compiled code concatenates nothing.

Requires: parameters that are concatenated along their first dimension, as
:func:`concatenated_parameters` lists them. Guarantees: one new parameter for each of the groups.
Runs after: CombineParallelBatchMatmul. Runs before: the split into forward and backward,
DispatchKernels.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import PassReport, RelaxPass, is_call, map_functions, with_body


@dataclass(frozen=True)
class LiftPackedWeights(RelaxPass):
    """Replace concatenations of parameters by new parameters.

    Args:
        groups: for each concatenation, the names of its parameters, in order.
        position: the index of the first new parameter among the function's; None: at the end.
        prefix: the new parameters are named ``prefix0``, ``prefix1`` ...
    """

    groups: tuple[tuple[str, ...], ...]
    position: int | None = None
    prefix: str = "packed_"

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: self._lift(f, report))

    def _lift(self, function: relax.Function, report: PassReport) -> relax.Function:
        lifted = _PackedWeightMutator(function, self, report)
        body = lifted.visit_expr(function.body)
        if not lifted.added:
            return function
        position = len(function.params) if self.position is None else self.position
        parameters = list(function.params)
        parameters[position:position] = [lifted.added[g] for g in self.groups if g in lifted.added]
        return with_body(function, body, parameters)


def concatenated_parameters(
    function: relax.Function, allowed: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of parameters that ``function`` concatenates along the first dimension.

    Returns:
        For each group the names of its parameters, in order.
    """
    found: dict[tuple[str, ...], None] = {}
    among, parameters = set(allowed), set(function.params)
    for block in function.body.blocks:
        for binding in block.bindings:
            names = _members(binding.value, parameters)
            if names and among.issuperset(names):
                found[names] = None
    return tuple(found)


def _members(value: relax.Expr, parameters: Set[relax.Var]) -> tuple[str, ...]:
    """Return the names of the parameters that ``value`` concatenates; empty if it does not."""
    if not is_call(value, "relax.concat") or not isinstance(value.args[0], relax.Tuple):
        return ()
    if value.attrs.axis is None or int(value.attrs.axis) != 0:
        return ()
    fields = list(value.args[0].fields)
    return tuple(f.name for f in fields) if all(f in parameters for f in fields) else ()


@mutator
class _PackedWeightMutator(PyExprMutator):
    def __init__(
        self, function: relax.Function, lift: LiftPackedWeights, report: PassReport
    ) -> None:
        super().__init__()
        self.parameters = set(function.params)
        self.lift = lift
        self.report = report
        self.added: dict[tuple[str, ...], relax.Var] = {}
        self.renamed: dict[relax.Var, relax.Var] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        names = _members(binding.value, self.parameters)
        if names in self.lift.groups:
            self.report.rewrote()
            if names not in self.added:
                number = self.lift.groups.index(names)
                self.added[names] = relax.Var(f"{self.lift.prefix}{number}", binding.value.ty)
            # Without a copying binding: passes must see that the readers read a parameter.
            self.renamed[binding.var] = self.added[names]
            return
        if names:
            self.report.decline(", ".join(names), "not among the groups")
        super().visit_var_binding_(binding)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.renamed.get(var, var)

    visit_dataflow_var_ = visit_var_

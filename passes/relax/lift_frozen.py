"""Values that depend on frozen weights alone are computed once, by a separate function.

Before (``w`` and ``s`` are frozen)::

    def forward(x, w, s):
        lv = w * s
        y = R.matmul(x, R.permute_dims(lv))

After::

    def transform_params(w, s):
        return (w * s,)

    def forward(x, frozen_0):
        y = R.matmul(x, R.permute_dims(frozen_0))

Operators that cost nothing at each call stay in ``forward``: reshapes, transposes that only
products read, broadcasts, and tensors filled with one number.

Requires: one dataflow block. Guarantees: ``forward`` keeps its parameters in their order, without
frozen ones that it does not read any more. After them it has one for each result of
``transform_params``, a function that exists only if it has results.
Runs after: the graph passes. Runs before: PackProducts, DispatchKernels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from tvmbridge.passes.base import (
    RESHAPES,
    PassReport,
    RelaxPass,
    bindings_of,
    free_prefix,
    is_call,
    readers_of,
    with_body,
)

TRANSFORM = "transform_params"

_MADE = ("relax.full", "relax.zeros", "relax.ones", "relax.broadcast_to")


@dataclass(frozen=True)
class LiftFrozen(RelaxPass):
    """Move values that depend on frozen parameters alone from ``forward`` to ``transform_params``.

    Args:
        frozen: names of the parameters whose values do not change.
        transposes: whether transposed operands of products are computed once, too.
        live: the places, among the bindings of ``forward``, of values that stay there.
    """

    frozen: tuple[str, ...]
    transposes: bool = False
    live: frozenset[int] = frozenset()

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        forward = mod["forward"]
        known = weights_alone(forward, self.frozen, self.live)
        found = _found(forward, known, self.transposes)
        functions = {name.name_hint: f for name, f in mod.functions_items()}
        if found.lifted:
            report.rewrote(len(found.lifted))
            functions[TRANSFORM] = _transform(forward, found)
        functions["forward"] = self._without(forward, found)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def _without(self, forward: relax.Function, found: _Found) -> relax.Function:
        """Return ``forward`` with new parameters for lifted values, without unread frozen ones."""
        prefix = free_prefix("frozen_", [p.name for p in forward.params])
        added = {v: relax.Var(f"{prefix}{i}", v.ty) for i, v in enumerate(found.lifted)}
        body = _LiftMutator(added, found.left_out).visit_expr(forward.body)
        read = set(relax.analysis.free_vars(body))
        frozen = set(self.frozen)
        parameters = [p for p in forward.params if p in read or p.name not in frozen]
        return with_body(forward, body, [*parameters, *added.values()])


def weights_alone(
    function: relax.Function, frozen: Collection[str], live: Collection[int] = ()
) -> set[relax.Var]:
    """Return the variables of ``function`` that depend on no parameters but the frozen ones.

    The frozen parameters themselves are included. The bindings at the places ``live``, and all
    that depends on them, are not.
    """
    known = {p for p in function.params if p.name in frozen}
    for place, (var, value) in enumerate(bindings_of(function).items()):
        if place not in live and known.issuperset(relax.analysis.free_vars(value)):
            known.add(var)
    return known


def varying_places(functions: Sequence[relax.Function]) -> frozenset[int] | None:
    """Return the places of bindings that differ between functions of the same form.

    None if the functions have different numbers of bindings. A binding differs if its value or the
    type of its variable does.
    """
    each = [list(bindings_of(function).items()) for function in functions]
    if len({len(bindings) for bindings in each}) > 1:
        return None
    return frozenset(
        place
        for place, pairs in enumerate(zip(*each, strict=True))
        if not all(
            tvm_ffi.structural_equal(value, pairs[0][1], map_free_vars=True)
            and tvm_ffi.structural_equal(var.ty, pairs[0][0].ty)
            for var, value in pairs[1:]
        )
    )


@dataclass(frozen=True)
class _Found:
    """The variables to lift.

    - ``lifted``: variables that become results of ``transform_params``.
    - ``left_out``: variables whose bindings ``forward`` does not need any more.
    """

    lifted: tuple[relax.Var, ...]
    left_out: frozenset[relax.Var]


def _found(function: relax.Function, known: set[relax.Var], transposes: bool) -> _Found:
    bound, readers = bindings_of(function), readers_of(function)
    lifted: list[relax.Var] = []
    stay: set[relax.Var | None] = {None, *(v for v in bound if v not in known)}
    for var in reversed([v for v in bound if v in known]):
        staying = [reader for reader in readers[var] if reader in stay]
        if not staying:
            continue
        read_by = [None if r is None else bound[r] for r in staying]
        if _costs_nothing(var, bound[var], read_by, transposes):
            stay.add(var)
        else:
            lifted.append(var)
    return _Found(tuple(reversed(lifted)), frozenset(known - stay))


def _costs_nothing(
    var: relax.Var,
    value: relax.Expr,
    readers: Collection[relax.Expr | None],
    transposes: bool,
) -> bool:
    """Whether computing ``value`` at each call is free, given the values that read it."""
    if not isinstance(var.ty, relax.TensorType) or not isinstance(value, relax.Call):
        return True
    name = getattr(value.op, "name", "")
    if name == "relax.permute_dims":
        return not transposes and all(is_call(reader, "relax.matmul") for reader in readers)
    return name in RESHAPES or name in _MADE


def _transform(forward: relax.Function, found: _Found) -> relax.Function:
    """Return the function that computes the lifted values from frozen parameters."""
    bound = bindings_of(forward)
    needed: set[relax.Var] = set(found.lifted)
    for var, value in reversed(bound.items()):
        if var in needed:
            needed.update(relax.analysis.free_vars(value))
    parameters = [p for p in forward.params if p in needed]
    bindings = [relax.VarBinding(v, value) for v, value in bound.items() if v in needed]
    type_ = relax.TupleType([v.ty for v in found.lifted])
    results = relax.Var("results", type_)
    bindings.append(relax.VarBinding(results, relax.Tuple(found.lifted)))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], results)
    made = relax.Function(parameters, body, type_, is_pure=True)
    return copy_with_new_vars(made).with_attr("global_symbol", TRANSFORM)


@mutator
class _LiftMutator(PyExprMutator):
    def __init__(self, added: dict[relax.Var, relax.Var], left_out: frozenset[relax.Var]) -> None:
        super().__init__()
        self.added = added
        self.left_out = left_out

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self.left_out:
            super().visit_var_binding_(binding)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.added.get(var, var)

    visit_dataflow_var_ = visit_var_

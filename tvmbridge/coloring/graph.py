"""The joint function as a policy sees it: colors, sizes in bytes, and what may be repeated."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tvm
from tvm import relax

from tvmbridge.coloring import operators
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.reached import reached
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.passes.base import flat_results, storage_root, tensor_bytes


class JointGraph:
    """The data dependencies of a joint function, from which a policy chooses what to repeat.

    Args:
        joint: the joint function.
        also: operators that may be repeated although they are expensive: ``relax.nn.softmax``, or
            the overload of an ATen call.
        whatever: whether every operator that :func:`.operators.may_run_twice` may be repeated.
            Operators that are not continuous are then not repeated: forward keeps their results,
            so that values with other roundings do not change them.

    Attributes:
        bound: the value of each binding, by its variable, in program order.
        operands: the variables that each binding reads.
        forward: the variables that the outputs depend on, and the items of tuples among them.
        backward: the variables that depend on a cotangent and that a gradient depends on.
        early: the variables that only gradients depend on, but that depend on no cotangent.
            Backward computes them, unless a policy makes forward compute and keep them.
        needed: the variables that backward reads and that depend on no cotangent: forward and
            early variables, and primals.
        movable: the variables that a policy decides about: all of ``forward``, and early variables
            that follow from them without rounding, such as the sign of an activation.
        fragile: variables that backward may compute again only by operators that do not round. An
            operator that is not continuous, such as a comparison, depends on them in backward, and
            a rounding difference could change its result.
    """

    def __init__(
        self, joint: JointModule, also: Collection[str] = (), *, whatever: bool = False
    ) -> None:
        function = joint.mod["joint"]
        self.bound = {b.var: b.value for b in function.body.blocks[0].bindings}
        self.operands = {v: _reads(value) for v, value in self.bound.items()}
        results = flat_results(function)
        self.outputs = results[: joint.num_outputs]
        self.gradients = results[joint.num_outputs :]
        self.primals = tuple(function.params[: len(joint.primals)])
        self._inputs = frozenset(self.primals)
        drawn = set(joint.drawn)
        self.drawn = frozenset(p for p in self.primals if p.name in drawn)
        self.forward = self._with_items(self._dependencies(self.outputs))
        self.backward, self.early, self.needed = self._backward(function.params)
        self._also = frozenset(also)
        self._whatever = whatever
        # Policies ask again and again, and the answers take long to read from Relax.
        self._repeatable: dict[relax.Var, bool] = {}
        self._sizes: dict[relax.Var, int | None] = {}
        self.movable = self._movable()
        self._held = self._decisions() if whatever else frozenset()
        saved = joint.saved
        copied = frozenset() if saved is None else saved.copied_primals
        self._copied = frozenset(p for p in self.primals if p.name in copied)
        unsaved = frozenset() if saved is None else saved.copied_outputs
        kept = [o for number, o in enumerate(self.outputs) if number not in unsaved]
        self._output_roots = {storage_root(o, self.bound) for o in kept} - {None}
        self.fragile = self._fragile()

    def may_repeat(self, var: relax.Var) -> bool:
        """Whether backward may compute ``var``, which depends on no cotangent."""
        known = self._repeatable.get(var)
        if known is None:
            known = self._repeatable[var] = self._may_repeat(var)
        return known

    def _may_repeat(self, var: relax.Var) -> bool:
        if var in self._held:
            return False
        if var in self.early:
            return True
        value = self.bound[var]
        if var in self.fragile and not operators.repeats_every_bit(value):
            return False
        return self._cheap(value)

    def _cheap(self, value: relax.Expr) -> bool:
        if self._whatever and operators.may_run_twice(value):
            return True
        return operators.is_cheap(value) or operators.operator_name(value) in self._also

    def nbytes(self, var: relax.Var) -> int | None:
        """Return the additional bytes held until backward if ``var`` is kept; None: it cannot be.

        Only tensors can be kept, and early variables only if they are movable. Primals and outputs
        cost nothing, because they live anyway, with two exceptions. Random draws cost their size.
        So do primals and outputs that eager PyTorch does not save: the user may write them, so
        that backward needs a copy.
        """
        if var not in self._sizes:
            self._sizes[var] = self._nbytes(var)
        return self._sizes[var]

    def _nbytes(self, var: relax.Var) -> int | None:
        if not isinstance(var.ty, relax.TensorType):
            return None
        if var in self.early and var not in self.movable:
            return None
        if var in self._inputs:
            return tensor_bytes(var) if var in self.drawn or var in self._copied else 0
        return 0 if storage_root(var, self.bound) in self._output_roots else tensor_bytes(var)

    def kept(self, repeated: Collection[relax.Var]) -> dict[relax.Var, None]:
        """Return the values that forward keeps if backward computes ``repeated`` itself.

        The result is an ordered set; it includes primals.

        Raises:
            UnsupportedOperatorError: a value that must be kept cannot be: it is not a tensor.
        """
        read = reached(self.needed, lambda var: self.operands[var] if var in repeated else ())
        kept = {var: None for var in read if var not in repeated}
        for var in kept:
            if self.nbytes(var) is None:
                raise UnsupportedOperatorError(
                    f"backward reads {var.name} as a whole, which is {var.ty} and no tensor"
                )
        return kept

    def bytes_kept(self, repeated: Collection[relax.Var]) -> int:
        """Return the bytes held until backward if backward computes ``repeated`` itself."""
        return sum(self.nbytes(var) or 0 for var in self.kept(repeated))

    def with_forward(self, kept: Iterable[relax.Var]) -> frozenset[relax.Var]:
        """Return the forward variables, and all variables that ``kept`` depends on."""
        return self._with_items(self.forward | self._dependencies(kept))

    def _dependencies(self, roots: Iterable[relax.Expr]) -> set[relax.Var]:
        """Return the bound variables that ``roots`` depend on, including the roots."""
        variables = (r for r in roots if isinstance(r, relax.Var))
        found = reached(variables, lambda var: self.operands[var] if var in self.bound else ())
        return {var for var in found if var in self.bound}

    def _with_items(self, forward: Collection[relax.Var]) -> frozenset[relax.Var]:
        """Add to ``forward`` the items of its tuples, since only tensors can be kept."""
        found = set(forward)
        for var, value in self.bound.items():
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in found:
                found.add(var)
        return frozenset(found)

    def _backward(
        self, parameters: Iterable[relax.Var]
    ) -> tuple[frozenset[relax.Var], frozenset[relax.Var], tuple[relax.Var, ...]]:
        """Return ``backward``, ``early`` and ``needed``, as the class describes them."""
        own = self._dependencies(self.gradients) - self.forward
        arrived = set(parameters) - set(self.primals)
        for var in self.bound:
            if var in own and not arrived.isdisjoint(self.operands[var]):
                arrived.add(var)
        backward = own & arrived
        read = {v: None for var in self.bound if var in backward for v in self.operands[var]}
        read |= {g: None for g in self.gradients if isinstance(g, relax.Var)}
        needed = tuple(v for v in read if v not in arrived)
        return frozenset(backward), frozenset(own - backward), needed

    def _movable(self) -> frozenset[relax.Var]:
        movable = set(self.forward)
        for var, value in self.bound.items():
            item = self._whatever and isinstance(value, relax.TupleGetItem)
            if var in self.early and (item or isinstance(value, relax.Call)):
                known = all(v in movable or v in self._inputs for v in self.operands[var])
                if known and self.operands[var] and operators.repeats_every_bit(value):
                    movable.add(var)
        return frozenset(movable)

    def _decisions(self) -> frozenset[relax.Var]:
        """Return the movable results of operators that are not continuous and read rounded values.

        Primals are not rounded again.
        """
        return frozenset(
            var
            for var in self.movable
            if not operators.is_smooth(self.bound[var])
            and any(_may_round(v) for v in self.operands[var] if v not in self._inputs)
        )

    def _fragile(self) -> frozenset[relax.Var]:
        """Return the floating-point values whose rounding could change a result in backward.

        An operator that is not continuous, and that backward may run, reads them directly or
        through operators that do not round.
        """
        fragile: set[relax.Var] = set()
        in_question = self._dependencies(self.needed)
        for var, value in reversed(self.bound.items()):
            decides = var not in self._held and not operators.is_smooth(value)
            own = var not in self.forward
            runs_again = own or (var in in_question and self._cheap(value))
            passes_on = var in fragile and (own or operators.repeats_every_bit(value))
            if (decides and runs_again) or passes_on:
                fragile |= {v for v in self.operands[var] if _may_round(v)}
        return frozenset(fragile)


def _may_round(var: relax.Var) -> bool:
    return operators.is_floating(var) or not isinstance(var.ty, relax.TensorType)


def _reads(value: relax.Expr) -> tuple[relax.Var, ...]:
    return tuple(v for v in relax.analysis.free_vars(value) if not tvm.ir.is_prim_expr(v))

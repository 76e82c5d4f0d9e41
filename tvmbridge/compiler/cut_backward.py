"""Cut the backward function into parts that run one after another, each returning some gradients.

::

    backward(reads..., residuals..., cotangents...) -> (a, b, c)
    part 0(reads..., residuals..., cotangents...)   -> (c, carried)
    part 1(reads..., residuals..., carried)         -> (a, b)

The order of the gradients follows from what each needs: the last layers' need the least. A
parameter may be written as soon as its gradient is handed out, for instance by an optimizer in a
hook. So everything that reads a parameter runs in the part of its gradient or before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from tvmbridge.coloring.operators import is_cheap, repeats_every_bit
from tvmbridge.compiler.split import build_function
from tvmbridge.core.errors import BuildError
from tvmbridge.core.reached import reached
from tvmbridge.passes.base import bindings_of, flat_results, tensor_bytes

# Parts do not pay if one of them runs more than this share of backward's operators.
_MOST_IN_ONE = 0.9


@dataclass(frozen=True)
class PartFunction:
    """One part of a backward function.

    - ``function``: the part; its last parameters are the cotangents or the values carried to it.
    - ``gradients``: the numbers of the gradients that are its first results.
    - ``reads``: the numbers of the parameters, before residuals and cotangents, that it reads.
    - ``takes``: for each carried value, its place among the values that earlier parts returned, in
      their order; empty in the first part, which takes the cotangents.
    """

    function: relax.Function
    gradients: tuple[int, ...]
    reads: tuple[int, ...]
    takes: tuple[int, ...]


def cut_backward(
    function: relax.Function,
    num_cotangents: int,
    memory: Sequence[Collection[int]],
    part_bytes: float,
) -> list[PartFunction]:
    """Return the parts of ``function``; a list of one or none if cutting does not pay.

    Args:
        num_cotangents: the number of its last parameters that are cotangents.
        memory: for each gradient, the numbers of the parameters that share memory with its primal.
        part_bytes: a part ends as soon as its gradients have this size.

    Raises:
        BuildError: a value that is no tensor would have to be carried from part to part.
    """
    graph = _Backward(function, num_cotangents)
    needs = [graph.needs(number, memory[number]) for number in range(len(graph.gradients))]
    order = sorted(range(len(needs)), key=lambda number: (needs[number].bit_count(), number))
    done = [0]
    size, left = 0, sum(map(graph.nbytes, order))
    for number in order:
        # A part without operators of its own would only hand out what is computed already.
        if size >= part_bytes and left >= part_bytes / 2 and needs[number] & ~done[-1]:
            done.append(done[-1])
            size = 0
        done[-1] |= needs[number]
        size += graph.nbytes(number)
        left -= graph.nbytes(number)
    works = [now & ~before for before, now in zip([0, *done], done, strict=False)]
    if len(works) < 2 or max(map(int.bit_count, works)) > _MOST_IN_ONE * done[-1].bit_count():
        return []
    groups: list[list[int]] = [[] for _ in works]
    for number in order:
        first = next(part for part, ran in enumerate(done) if not needs[number] & ~ran)
        groups[first].append(number)
    return graph.parts(groups, works)


class _Backward:
    """The data dependencies of a backward function; sets of bindings are bits of an integer.

    Cheap values that depend on no cotangent, such as casts and views of parameters, are *repeated*:
    each part that reads one computes it. A repeated value is in no set.
    """

    def __init__(self, function: relax.Function, num_cotangents: int) -> None:
        self.function = function
        params = list(function.params)
        self.first = len(params) - num_cotangents
        self.cotangents = params[self.first :]
        self.given = {p: number for number, p in enumerate(params[: self.first])}
        self.bound = bindings_of(function)
        self.gradients = flat_results(function)
        self.bindings = [b for block in function.body.blocks for b in block.bindings]
        self.operands = {v: relax.analysis.free_vars(e) for v, e in self.bound.items()}
        arrived: set[relax.Var] = set(self.cotangents)
        self.repeated: set[relax.Var] = set()
        self.bit: dict[relax.Var, int] = {}
        # For each value, the bindings that it depends on, itself included.
        self.behind: dict[relax.Var, int] = {}
        for number, (var, value) in enumerate(self.bound.items()):
            if not arrived.isdisjoint(self.operands[var]):
                arrived.add(var)
            elif self._is_repeated(value):
                self.repeated.add(var)
            self.bit[var] = 0 if var in self.repeated else 1 << number
            self.behind[var] = self.bit[var] | _union(
                self.behind.get(v, 0) for v in self.operands[var]
            )
        self.users: dict[relax.Var, list[relax.Var]] = {}
        for var, operands in self.operands.items():
            for operand in operands:
                self.users.setdefault(operand, []).append(var)

    def _is_repeated(self, value: relax.Expr) -> bool:
        if isinstance(value, relax.TupleGetItem):
            return value.tuple_value in self.repeated
        return is_cheap(value) and repeats_every_bit(value)

    def nbytes(self, number: int) -> int:
        """Return the size of a gradient in bytes."""
        return tensor_bytes(self.gradients[number])

    def needs(self, number: int, memory: Collection[int]) -> int:
        """Return the bindings that run before gradient ``number`` may be handed out."""
        found = self.behind.get(self.gradients[number], 0)
        given = [p for p, position in self.given.items() if position in memory]

        def users(var: relax.Var) -> Iterable[relax.Var]:
            return self.users.get(var, ()) if var in self.repeated or var in self.given else ()

        for user in reached(given, users):
            if user not in self.repeated:
                found |= self.behind.get(user, 0)
        return found

    def parts(self, groups: Sequence[Sequence[int]], works: Sequence[int]) -> list[PartFunction]:
        """Return a part for each group of gradients, which runs the bindings of its work."""
        part_of: dict[relax.Var, int] = dict.fromkeys(self.cotangents, 0)
        for var, bit in self.bit.items():
            for number, work in enumerate(works):
                if bit & work:
                    part_of[var] = number
        self._keep_items_with_tuples(part_of)
        chosen = [self._chosen(n, part_of, group) for n, group in enumerate(groups)]
        # The values that each part returns, beside its gradients, for later ones.
        handed: list[dict[relax.Var, None]] = [{} for _ in groups]
        for number, (_, read) in enumerate(chosen):
            for var in read:
                if part_of.get(var, number) < number:
                    handed[part_of[var]][var] = None
        place = {var: i for i, var in enumerate(v for each in handed for v in each)}
        found = []
        for number, ((run, read), group) in enumerate(zip(chosen, groups, strict=True)):
            taken = [v for v in place if v in read and part_of[v] < number]
            results = [self.gradients[i] for i in group]
            function = self._function(run, taken if number else self.cotangents, results,
                                      handed[number])  # fmt: skip
            reads = tuple(sorted(self.given[v] for v in read if v in self.given))
            takes = tuple(place[v] for v in taken)
            found.append(PartFunction(function, tuple(group), reads, takes))
        return found

    def _keep_items_with_tuples(self, part_of: dict[relax.Var, int]) -> None:
        """Move the items of a tuple into the part that computes it: only tensors are carried."""
        for var, value in self.bound.items():
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in part_of:
                part_of[var] = part_of[value.tuple_value]

    def _chosen(
        self, number: int, part_of: Mapping[relax.Var, int], group: Sequence[int]
    ) -> tuple[set[relax.Var], dict[relax.Var, None]]:
        """Return the bindings of a part, repeated ones included, and all values that they read."""
        run = {v for v, part in part_of.items() if part == number and v in self.bound}
        read: dict[relax.Var, None] = {}
        pending = [*run, *(self.gradients[i] for i in group)]
        read.update(dict.fromkeys(v for v in pending if isinstance(v, relax.Var) and v not in run))
        seen: set[relax.Var] = set()
        while pending:
            var = pending.pop()
            if var in seen or not isinstance(var, relax.Var):
                continue
            seen.add(var)
            if var in self.repeated:
                run.add(var)
            if var in run:
                read.update(dict.fromkeys(self.operands[var]))
                pending.extend(v for v in self.operands[var] if v in self.repeated)
        return run, {v: None for v in read if v not in run}

    def _function(
        self,
        run: Collection[relax.Var],
        taken: Sequence[relax.Var],
        gradients: Sequence[relax.Expr],
        handed: Iterable[relax.Var],
    ) -> relax.Function:
        if any(not isinstance(v.ty, relax.TensorType) for v in taken):
            raise BuildError("backward cannot be cut: a part would carry a value that is no tensor")
        inputs = [*self.function.params[: self.first], *taken]
        bindings = [b for b in self.bindings if b.var in run]
        return build_function("backward", inputs, bindings, [*gradients, *handed])


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def memory_of(
    reads: Sequence[str],
    wanted: Sequence[str],
    packed: Mapping[str, Collection[str]],
) -> list[frozenset[int]]:
    """Return, for each gradient, the numbers of the read primals that share its primal's memory.

    Args:
        packed: the names of the parameters of each packed weight, by the name of its primal.
    """
    return [
        frozenset(i for i, r in enumerate(reads) if r == name or name in packed.get(r, ()))
        for name in wanted
    ]

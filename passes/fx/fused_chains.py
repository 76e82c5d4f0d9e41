"""Fuse N equal chains of operators, one operator after the other, from their common start.

A *family* is a :class:`~.stacking.ParallelSlices`: N equal nodes, its *members*, computed as one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.reached import reached
from tvmbridge.passes.fx.base import (
    LEAVES,
    Emitter,
    bound_arguments,
    erase_items,
    is_operator,
    positions,
    shape_of,
    value_of,
)
from tvmbridge.passes.fx.costs import Costs
from tvmbridge.passes.fx.effects import CircularError, ordered, sort, written
from tvmbridge.passes.fx.hand_back import HandBack
from tvmbridge.passes.fx.stacking import (
    Each,
    Members,
    NotStackedError,
    ParallelSlices,
    equal_shapes,
    rule_for,
)
from tvmbridge.passes.fx.starts import Start

aten = torch.ops.aten


def fuse_all(
    graph: fx.Graph,
    candidates: Sequence[tuple[str, Callable[[frozenset[fx.Node]], Start]]],
    costs: Costs | None,
    report: PassReport,
    what: str,
) -> None:
    """Fuse the chains of every candidate that is not declined, and sort the graph.

    If side effects leave no order of the nodes, ``report`` counts no rewrite, and the caller must
    discard the graph.

    Args:
        candidates: pairs of a name and a function. The function gets the nodes that are written in
        costs: decide whether a fusion is worth it; None: the costs of the device's type.
    """
    places = {node: float(place) for node, place in positions(graph).items()}
    order, touched = ordered(graph), written(graph)
    for name, start in candidates:
        try:
            report.rewrote(Chains(graph, start(touched), costs, touched, places).fuse())
        except NotStackedError as reason:
            report.decline(name, str(reason))
    if not report.rewrites:
        return
    try:
        sort(graph, places, [order])
    except CircularError as error:
        report.rewrites = 0
        report.decline(what, str(error))


class Chains:
    """The equal chains of operators that begin at one :class:`~.starts.Start`.

    Args:
        costs: decide whether the fusion is worth it; None: the costs of the device's type.
        touched: the nodes whose memory the graph writes.
    """

    def __init__(
        self,
        graph: fx.Graph,
        start: Start,
        costs: Costs | None,
        touched: frozenset[fx.Node],
        places: dict[fx.Node, float],
    ) -> None:
        self.start = start
        self.costs = costs or Costs.of(value_of(start.nodes[0]).device)
        self.touched = touched
        self.places = places
        self.emit = Emitter(graph, places, start.nodes[0])
        self.fused: dict[fx.Node, tuple[ParallelSlices, int]] = {}
        self.families: list[ParallelSlices] = []
        self.reasons: dict[fx.Node, str] = {}
        self.launches = self.copied = 0
        self.redrawn: list[tuple[fx.Node, fx.Node]] = []

    def fuse(self) -> int:
        """Fuse the chains in the graph; return how many fewer kernels the graph launches.

        Raises:
            NotStackedError: nothing was fused, and the graph is unchanged.
        """
        start = self._start()
        todo = [start]
        while todo:
            family = todo.pop(0)
            for users in self._equal_users(family):
                grown = self._grow(users)
                if grown is not None:
                    todo.append(grown)
        if not self.families:
            self.emit.erase_unused()
            raise NotStackedError(self._reason() or "nothing is computed of them")
        hand_back = HandBack(self.emit, self.families, set(self.fused))
        launches = self.launches - hand_back.launches()
        gain = self.costs.gain(launches, self.copied + hand_back.copied())
        if launches <= 0 or gain <= 0:
            self.emit.erase_unused()
            also = self._reason()
            raise NotStackedError(
                "the copies would cost more than the launches that are saved"
                + (f"; {also}" if also else "")
            )
        for node, ones in self.redrawn:
            node.replace_input_with(node.all_input_nodes[0], ones)
        hand_back.replace()
        self._erase()
        return launches

    def _reason(self) -> str:
        """Return why operators that read the chains were not fused."""
        return "; ".join(dict.fromkeys(v for k, v in self.reasons.items() if k not in self.fused))

    def _start(self) -> ParallelSlices:
        nodes, begin = self.start.nodes, self.start
        value, dim = begin.value(self.emit)
        family = self._family(nodes, value, dim)
        self.copied += begin.copied
        self.launches -= sum(map(_launches, self.emit.made))
        if begin.replaces:
            self.families.append(family)
            self.launches += len(nodes)
        return family

    def _family(self, nodes: tuple[fx.Node, ...], value: fx.Node, dim: int) -> ParallelSlices:
        family = ParallelSlices(nodes, value, dim)
        self.fused |= {node: (family, index) for index, node in enumerate(nodes)}
        return family

    def _equal_users(self, family: ParallelSlices) -> Iterator[tuple[fx.Node, ...]]:
        """For each reader of the first member, yield N equal readers, one of each member."""
        for first in list(family.nodes[0].users):
            if first in self.fused or not is_operator(first):
                continue
            if first.target in (aten.cat.default, aten.stack.default):
                continue
            equal = [self._equal(first, user) for user in self._users(family)]
            if None not in equal and all(equal):
                yield tuple(e for e in equal if e is not None)

    def _users(self, family: ParallelSlices) -> list[list[fx.Node]]:
        return [[u for u in node.users if u not in self.fused] for node in family.nodes]

    def _equal(self, first: fx.Node, users: Sequence[fx.Node]) -> fx.Node | None:
        alike = (u for u in users if u.target is first.target and equal_shapes([first, u]))
        return next(alike, None)

    def _grow(self, users: tuple[fx.Node, ...]) -> ParallelSlices | None:
        """Fuse N equal operators; return the family of their results, or None if they stay."""
        if len(set(users)) < len(users) or any(u in self.fused for u in users):
            return None
        target: Any = users[0].target
        made = len(self.emit.made)
        try:
            given = self._arguments(users)
            if any(n in self.touched for u in users for n in (u, *u.all_input_nodes)):
                raise NotStackedError(f"{target} reads or makes a tensor that is written in place")
            value, dim = self._apply(target, given, users)
            expected = shape_of(users[0]) or ()
            if len(shape_of(value) or ()) != len(expected) + 1:
                raise NotStackedError(f"{target} broadcasts the members")
        except NotStackedError as reason:
            self.reasons[users[0]] = str(reason)
            return None
        launched = [n for n in self.emit.made[made:] if _launches(n)]
        stacks = [v for v in given.values() if isinstance(v, Each)]
        copied = sum(2 * each.nbytes for each in stacks)
        if stacks and self.costs.gain(len(users), copied) <= 0:
            bytes_ = f"{copied // 2} bytes of weights for {target}"
            self.reasons[users[0]] = f"stacking {bytes_} would cost more than it saves"
            return None
        self.launches += sum(map(_launches, users)) - len(launched)
        self.copied += copied
        family = self._family(users, value, dim)
        self.families.append(family)
        return family

    def _apply(
        self, target: Any, given: dict[str, Any], users: tuple[fx.Node, ...]
    ) -> tuple[fx.Node, int]:
        if target is aten.dropout.default:
            return self._dropout(given, users)
        rule = rule_for(target)
        if rule is None:
            raise NotStackedError(f"there is no rule for {target}")
        return rule(target, given, self.emit)

    def _dropout(self, given: dict[str, Any], users: tuple[fx.Node, ...]) -> tuple[fx.Node, int]:
        """Emit one product with N dropout masks.

        Each dropout stays in its place and draws its mask, now as the dropout of a tensor of ones.
        """
        family = given["input"].family
        if not given["p"] or not given["train"]:
            return family.value, family.dim
        if not all(map(_is_contiguous, family.nodes)):
            raise NotStackedError("dropout of tensors that are not contiguous would draw others")
        one = self.emit(aten.select.int, family.value, family.dim, 0)
        ones = self.emit(aten.ones_like.default, one, memory_format=torch.contiguous_format)
        self.places[ones] = self.places[one]
        self.redrawn += [(user, ones) for user in users]
        masks = self.emit(aten.stack.default, list(users), family.dim)
        # The dropouts stay to draw the masks, so their launches are not saved.
        self.launches -= len(users)
        return self.emit(aten.mul.Tensor, family.value, masks), family.dim

    def _arguments(self, users: tuple[fx.Node, ...]) -> dict[str, Any]:
        """Merge the arguments of N equal operators, by name.

        Raises:
            NotStackedError: they differ in a way that no rule supports.
        """
        bound = [bound_arguments(u) for u in users]
        if any(b.keys() != bound[0].keys() for b in bound):
            raise NotStackedError(f"{users[0].target} is called in several ways")
        return {name: self._merged([b[name] for b in bound], users[0]) for name in bound[0]}

    def _merged(self, values: list[Any], user: fx.Node) -> Any:
        first = values[0]
        if not isinstance(first, fx.Node):
            nested: list[fx.Node] = []
            fx.map_arg(values, nested.append)
            if nested or any(v != first or type(v) is not type(first) for v in values[1:]):
                raise NotStackedError(f"the arguments of {user.target} differ")
            return first
        if not all(isinstance(v, fx.Node) for v in values):
            raise NotStackedError(f"the arguments of {user.target} differ")
        if first in self.fused:
            family = self.fused[first][0]
            if tuple(values) != family.nodes:
                raise NotStackedError(f"{user.target} reads members of several chains")
            return Members(family)
        if all(v is first for v in values):
            if self._reads_chains(first):
                raise NotStackedError(f"an operand of {user.target} is computed of the chains")
            return first
        if not all(v.op in LEAVES for v in values) or not equal_shapes(values):
            raise NotStackedError(
                f"the operands of {user.target} differ, and are no weights of one shape"
            )
        return Each(tuple(values))

    def _reads_chains(self, node: fx.Node) -> bool:
        """Whether ``node`` depends on a member of a family."""
        inputs = reached([node], lambda n: () if n in self.fused else n.all_input_nodes)
        return any(each in self.fused for each in inputs)

    def _erase(self) -> None:
        kept = {node for node, _ in self.redrawn} | set(self.start.nodes)
        for family in reversed(self.families):
            for node in family.nodes:
                if node not in kept and not node.users:
                    node.graph.erase_node(node)
        erase_items(self.start.nodes)
        self.emit.erase_unused()


def _is_contiguous(node: fx.Node) -> bool:
    """Whether the tensor is contiguous for all sizes; compares symbols without adding a guard."""
    value = value_of(node)
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(stride) != str(expected):
            return False
        expected = size * expected
    return True


_VIEWS = frozenset({aten.movedim.int, aten.flatten.using_ints, aten.unflatten.int})


def _launches(node: fx.Node) -> int:
    """Return 1 if the node launches a kernel, and 0 if it is a view, an item or no call."""
    target: Any = node.target
    if target in _VIEWS or target is operator.getitem:
        return 0
    if not is_operator(node):
        return int(node.op == "call_function")
    return int(not any(r.alias_info is not None for r in target._schema.returns))

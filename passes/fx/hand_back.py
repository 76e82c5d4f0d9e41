"""Give readers that were not fused their tensors: views of the value that was computed at once.

A *family* is a :class:`~.stacking.ParallelSlices`, N nodes computed as one value; its *members* are
these nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.passes.fx.base import Emitter, bound_arguments, nbytes, shape_of
from tvmbridge.passes.fx.effects import views_of
from tvmbridge.passes.fx.stacking import ParallelSlices, with_dim

aten = torch.ops.aten


class HandBack:
    """Redirects the readers of fused nodes to the fused values.

    A concatenation of all members of a family becomes a view of the family's value. Other readers
    that are not fused themselves get one slice of it.

    Args:
        families: the families whose members are computed as one value.
        fused: the members of all families.
    """

    def __init__(
        self, emit: Emitter, families: Sequence[ParallelSlices], fused: set[fx.Node]
    ) -> None:
        self.emit = emit
        self.families = families
        # Members, and the nodes that replace them.
        self.made = frozenset(emit.made)
        self.inner = fused | self.made
        self._joined = [(f, c, at) for f in families for c, at in self._concatenations(f)]
        self._readers = Counter(self._root(f.value) for f in families for _ in self._outer(f))

    def launches(self) -> int:
        """Return how many more kernels the redirected readers launch; negative if fewer."""
        more = 0
        for family, cat, _ in self._joined:
            whole = len(_list(cat)) == len(family.nodes)
            more += int(_copies(family, cat)) - int(whole) + int(self._must_own(family, cat))
        for family in self.families:
            more += sum(_returned(node) for node in family.nodes)
        return more

    def copied(self) -> int:
        """Return how many bytes the rewritten graph copies that the original did not.

        A symbolic size counts as its size in the sample.
        """
        return sum(2 * nbytes(f.value) for f, cat, _ in self._joined if _copies(f, cat))

    def replace(self) -> None:
        """Redirect the readers, in the graph."""
        for family, cat, _ in self._joined:
            self._join(family, cat)
        for family in self.families:
            for index, node in enumerate(family.nodes):
                self._give(family, index, node)

    def _concatenations(self, family: ParallelSlices) -> Iterator[tuple[fx.Node, int]]:
        """Yield concatenations with all members as consecutive items, and the first one's index."""
        for user in family.nodes[0].users:
            if user in self.inner or user.target not in (aten.cat.default, aten.stack.default):
                continue
            items, count = _list(user), len(family.nodes)
            at = items.index(family.nodes[0])
            row = tuple(items[at : at + count]) == family.nodes
            if row and (user.target is aten.cat.default or len(items) == count):
                yield user, at

    def _join(self, family: ParallelSlices, cat: fx.Node) -> None:
        dim = _dim(cat)
        value = with_dim(family, dim, self.emit)
        if cat.target is aten.stack.default:
            self._replace(family, cat, value)
            return
        value = self.emit(aten.flatten.using_ints, value, dim, dim + 1)
        items = _list(cat)
        at = items.index(family.nodes[0])
        items[at : at + len(family.nodes)] = [value]
        if len(items) == 1:
            self._replace(family, cat, value)
        else:
            cat.args = (items, *cat.args[1:])

    def _outer(self, family: ParallelSlices) -> set[fx.Node]:
        """Return the nodes that read members and are not fused themselves."""
        return {u for node in family.nodes for u in node.users if u not in self.inner}

    def _root(self, value: fx.Node) -> fx.Node:
        """Return the node that owns the memory of ``value``."""
        while value in self.made and views_of(value):
            value = value.all_input_nodes[0]
        return value

    def _must_own(self, family: ParallelSlices, cat: fx.Node) -> bool:
        """Whether the concatenation is returned by the graph, but would share memory as a view.

        The caller of the graph may write into the tensors that it returns, so they must own their
        memory.
        """
        root = self._root(family.value)
        return _returned(cat) and (self._readers[root] > 1 or root not in self.made)

    def _replace(self, family: ParallelSlices, cat: fx.Node, value: fx.Node) -> None:
        if self._must_own(family, cat):
            value = self.emit(aten.clone.default, value, memory_format=torch.contiguous_format)
        cat.replace_all_uses_with(value)
        cat.graph.erase_node(cat)

    def _give(self, family: ParallelSlices, index: int, node: fx.Node) -> None:
        users = [u for u in node.users if u not in self.inner]
        if not users:
            return
        part = self.emit(aten.select.int, family.value, family.dim, index)
        if _returned(node):
            part = self.emit(aten.clone.default, part, memory_format=torch.contiguous_format)
        node.replace_all_uses_with(part, delete_user_cb=lambda user: user in users)


def _list(cat: fx.Node) -> list[Any]:
    items: Any = cat.args[0]
    return list(items)


def _dim(cat: fx.Node) -> int:
    return int(bound_arguments(cat)["dim"]) % len(shape_of(cat) or (1,))


def _copies(family: ParallelSlices, cat: fx.Node) -> bool:
    """Whether the concatenation needs a copy, as its dimension is not the family's."""
    return family.dim != _dim(cat) and cat.target is aten.cat.default


def _returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)

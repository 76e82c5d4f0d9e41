"""FeatureFusion: N lookups in tables of equal shape become one, and so do the chains after them.

    a = embedding_bag(A, i, p)         n = on_device(sizes_of([i, j]))
    b = embedding_bag(B, j, q)   ->    s = embedding_bag(cat([A, B]),
                                                         joined_indices(cat([i, j]), n, len(A)),
                                                         joined_offsets(stack([p, q]), n))
    cat([tanh(a), tanh(b)], 1)         flatten(movedim(tanh(unflatten(s, 0, [2, -1])), 0, 1), 1)

Requires: ATen operators with fake values, as torch.export leaves them. Guarantees: the N modules
keep their tables, which get their gradients as pieces of one tensor. An index beyond its own table,
or a bag beyond its own indices, is still an error. The graph concatenates the tables at each call,
if that costs less than the launches that it saves. Runs after CombineSparseInputs, before
HorizontalFusion.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.torch_private import assert_async
from tvmbridge.passes.fx.base import (
    LEAVES,
    Emitter,
    FxPass,
    bound_arguments,
    erase_items,
    evaluated,
    nbytes,
    shape_of,
    value_of,
)
from tvmbridge.passes.fx.combine_sparse_inputs import combined_of
from tvmbridge.passes.fx.costs import Costs
from tvmbridge.passes.fx.fused_chains import fuse_all
from tvmbridge.passes.fx.stacking import NotStackedError, size_key

aten = torch.ops.aten
_BAGS = aten.embedding_bag.padding_idx
_ROWS = aten.embedding.default


def sizes_of(indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the number of indices of each feature, as a tensor on the host."""
    return torch.tensor([len(each) for each in indices])


def on_device(sizes: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    """Copy ``sizes`` to the device of ``joined``, without waiting for the device."""
    return sizes.pin_memory().to(joined.device, non_blocking=True) if joined.is_cuda else sizes


def joined_indices(joined: torch.Tensor, sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """Turn concatenated indices of N tables into indices of the concatenated table.

    An index outside its own table becomes -1, which is outside the concatenated table as well.

    Args:
        sizes: the number of indices of each table, on the device of ``joined``.
        rows: the number of rows of each table.
    """
    table = torch.arange(len(sizes), device=joined.device, dtype=joined.dtype)
    table = table.repeat_interleave(sizes, output_size=len(joined))
    outside = joined.div(rows, rounding_mode="floor") != 0
    if joined.dim() > 1:
        table = table.view(-1, *[1] * (joined.dim() - 1))
    return torch.add(joined, table, alpha=rows).masked_fill_(outside, -1)


def joined_offsets(offsets: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return where the bags begin among the concatenated indices of all tables.

    Args:
        offsets: a row for each table: where its bags begin among its own indices.

    Raises:
        RuntimeError: the first bag of a table does not begin at its first index, or a bag begins
            after its last one. On a GPU an assertion fails there instead.
    """
    if offsets.numel():
        right = (offsets[:, 0] == 0) & (offsets[:, -1] <= sizes)
        assert_async(right.all(), "offsets beyond the indices")
    starts = sizes.cumsum(0) - sizes
    return (offsets + starts.unsqueeze(1)).to(offsets.dtype).flatten()


@dataclass(frozen=True)
class FeatureFusion(FxPass):
    """Replace equal embedding lookups by one, and fuse the chains of operators after them.

    Args:
        least: the smallest number of lookups that is fused.
        costs: the time of a launch and of a copied byte; a fusion that would cost more than it
            saves is declined. None: the costs of the device's type.
    """

    least: int = 2
    costs: Costs | None = None

    def applies(self, graph_module: fx.GraphModule) -> bool:
        """Whether there are at least ``least`` equal lookups."""
        return any(len(g) >= self.least for g in _groups(graph_module.graph))

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Fuse every group of equal lookups, and the equal chains that read them."""
        graph = graph_module.graph
        groups = [group for group in _groups(graph) if len(group) >= self.least]
        read = [each.given["indices"] for group in groups for each in group]
        candidates = [
            (f"{len(group)} lookups by {group[0].call.name}", partial(_start, group))
            for group in groups
        ]
        fuse_all(graph, candidates, self.costs, report, "all lookups")
        if report.rewrites:
            erase_items([node for node in read if node.op == "call_function"])


@dataclass(frozen=True)
class Lookup:
    """An embedding lookup.

    - ``node``: the node of its result.
    - ``call``: the node of the operator, which is ``node`` unless the operator returns a tuple.
    - ``given``: the arguments of the operator by name.
    """

    node: fx.Node
    call: fx.Node
    given: dict[str, Any]

    @property
    def tensors(self) -> list[fx.Node]:
        """The tensors that the operator reads."""
        return self.call.all_input_nodes

    @property
    def options(self) -> tuple[Any, ...]:
        """All arguments by name, with an empty string for each tensor."""
        return tuple((k, "" if isinstance(v, fx.Node) else v) for k, v in self.given.items())


class Lookups:
    """A start of chains (:class:`~.starts.Start`) at equal lookups in tables of one shape.

    Raises:
        NotStackedError: the lookups cannot become one.
    """

    replaces = True

    def __init__(self, group: Sequence[Lookup]) -> None:
        given = group[0].given
        if given.get("sparse"):
            raise NotStackedError("gradients of the tables are sparse")
        if given["scale_grad_by_freq"]:
            raise NotStackedError("gradients are scaled by how often an index occurs")
        if given.get("include_last_offset"):
            raise NotStackedError("offsets have the end of the last bag")
        if given["padding_idx"] not in (None, -1):
            raise NotStackedError("an index stands for padding")
        if not shape_of(given["indices"]):
            raise NotStackedError("indices are single numbers")
        self.nodes = tuple(each.node for each in group)
        self.copied = 2 * sum(nbytes(each.given["weight"]) for each in group)
        self._group = group

    def value(self, emit: Emitter) -> tuple[fx.Node, int]:
        """Emit one lookup; return the rows of all, and 0, the dimension that counts the lookups."""
        given = dict(self._group[0].given)
        given["weight"] = emit(aten.cat.default, self._each("weight"))
        rows = (shape_of(self._group[0].given["weight"]) or (0,))[0]
        joined, sizes = self._indices(emit)
        given["indices"] = emit.valued(value_of(joined), joined_indices, joined, sizes, rows)
        if self._group[0].call.target is _ROWS:
            rows_of_all = emit(_ROWS, *given.values())
            return emit(aten.unflatten.int, rows_of_all, 0, [len(self.nodes), -1]), 0
        stacked = emit(aten.stack.default, self._each("offsets"))
        value = evaluated(aten.flatten.using_ints, (stacked,), {})
        given["offsets"] = emit.valued(value, joined_offsets, stacked, sizes)
        if given["per_sample_weights"] is not None:
            given["per_sample_weights"] = emit(aten.cat.default, self._each("per_sample_weights"))
        bags = emit(operator.getitem, emit(_BAGS, *given.values()), 0)
        return emit(aten.unflatten.int, bags, 0, [len(self.nodes), -1]), 0

    def _each(self, name: str) -> list[fx.Node]:
        return [each.given[name] for each in self._group]

    def _indices(self, emit: Emitter) -> tuple[fx.Node, fx.Node]:
        """Emit the concatenated indices, and how many each feature has, on the device."""
        parts = self._each("indices")
        whole = combined_of(parts)
        if whole is None:
            joined = emit(aten.cat.default, parts)
            sizes = emit.valued(self._sizes(joined), sizes_of, parts)
        else:
            joined, sizes = whole
        return joined, emit.valued(self._sizes(joined), on_device, sizes, joined)

    def _sizes(self, joined: fx.Node) -> Any:
        value = value_of(joined)
        return value.new_empty((len(self.nodes),), dtype=torch.int64)


def _start(group: Sequence[Lookup], touched: frozenset[fx.Node]) -> Lookups:
    lookups = Lookups(group)
    if any(n in touched for each in group for n in (each.node, *each.tensors)):
        raise NotStackedError("they are, or read, what is written in place")
    return lookups


def _groups(graph: fx.Graph) -> list[list[Lookup]]:
    """Return groups of lookups that differ only in their tables and indices."""
    found: dict[Any, list[Lookup]] = {}
    for each in _lookups(graph):
        found.setdefault(_kind(each), []).append(each)
    return list(found.values())


def _lookups(graph: fx.Graph) -> Iterator[Lookup]:
    for node in graph.nodes:
        if node.target is _ROWS:
            result = node
        elif node.target is _BAGS:
            read = [u for u in node.users if u.users]
            if len(read) != 1 or read[0].args[1] != 0:
                continue
            (result,) = read
        else:
            continue
        given = bound_arguments(node)
        table = given["weight"]
        if isinstance(table, fx.Node) and table.op in LEAVES and len(shape_of(table) or ()) == 2:
            yield Lookup(result, node, given)


def _kind(lookup: Lookup) -> Any:
    """Return a key that equal lookups have in common."""
    table, indices = value_of(lookup.given["weight"]), value_of(lookup.given["indices"])
    shape = tuple(map(size_key, value_of(lookup.node).shape))
    kinds = [
        (v.dtype, v.device) for v in map(value_of, lookup.tensors) if isinstance(v, torch.Tensor)
    ]
    sizes = tuple(map(size_key, indices.shape)) if lookup.call.target is _ROWS else ()
    return str(lookup.call.target), tuple(table.shape), shape, sizes, lookup.options, tuple(kinds)

"""Replace ``view`` by ``reshape``, which allows any strides, in an exported program.

A program is recorded with the strides of PyTorch's kernels, and without calls of ``contiguous()``
that these strides make needless. Decompositions may give other strides. Decomposed attention is
contiguous, for example, whereas the fused kernel's result has the strides of its query. A ``view``
that was possible in the recording then raises; a ``reshape`` copies.

For memory that is mutated, it matters whether a ``reshape`` is a view or a copy. Such a ``reshape``
becomes a ``view`` or a ``clone``, as it was in the recording.

``as_strided`` reads the memory of its operand. It gets a contiguous copy of that memory in the
recorded order, so that the strides from decompositions do not matter. Writes before it are in the
copy; a write after it, to its result or to the operand, would not reach the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tvmbridge.calls.views import in_order_of_memory
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import OpOverload, pytree, storage_key
from tvmbridge.core.writes import written_by

aten = torch.ops.aten


# They return a view if their operand's strides allow one, and a copy otherwise.
_VIEW_OR_COPY = (
    aten.reshape.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.ravel.default,
    aten.contiguous.default,
)

_BY_STRIDES = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
)


def reshape_instead_of_view(program: ExportedProgram) -> None:
    """Change the views of ``program`` into reshapes, except for views of memory that is written.

    A write through a view that became a copy would be lost. A ``reshape`` of such memory becomes a
    ``view`` or a ``clone``, as recorded, and ``as_strided`` gets its memory in the recorded order.

    Raises:
        CaptureError: ``as_strided`` has an operand whose memory cannot be given to it.
    """
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    written = {s for graph in graphs for node in graph.nodes for s in _written_by(node)}
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=aten.view.default):
            if written.isdisjoint(_storages(node)):
                node.target = aten.reshape.default
        for target in _VIEW_OR_COPY if written else ():
            for node in graph.find_nodes(op="call_function", target=target):
                if not written.isdisjoint((*_storages(node), *_storages(node.args[0]))):
                    _decide(graph, node)
    give_memory(graphs)


def give_memory(graphs: Sequence[fx.Graph]) -> None:
    """Let each ``as_strided`` of a program's graphs read memory in the recorded order."""
    for graph in graphs:
        others = [node for other in graphs if other is not graph for node in other.nodes]
        # What is written after a node, or in another graph at any time.
        written = {storage for node in others for storage in _written_by(node)}
        for node in reversed(list(graph.nodes)):
            written.update(_written_by(node))
            if node.target in _BY_STRIDES:
                _give_memory(graph, node, may_copy=written.isdisjoint(_storages(node.args[0])))


def _decide(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``node`` by a view or by a copy, whichever it was in the recording."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    shape = list(node.meta["val"].shape)
    with graph.inserting_before(node):
        if set(_storages(node)).isdisjoint(_storages(operand)):
            operand = graph.call_function(
                aten.clone.default, (operand,), {"memory_format": torch.contiguous_format}
            )
            operand.meta = dict(node.meta)
        view = graph.call_function(aten.view.default, (operand, shape))
    view.meta = dict(node.meta)
    node.replace_all_uses_with(view)
    graph.erase_node(node)


def _give_memory(graph: fx.Graph, node: fx.Node, *, may_copy: bool) -> None:
    """Let ``node`` read a contiguous tensor whose elements have the recorded order of memory.

    Raises:
        CaptureError: the operand does not fill its memory, or it is not contiguous and is written
            from then on, or scattered into.
    """
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    fake = operand.meta["val"]
    contiguous = fake.is_contiguous()
    order = tuple(range(fake.dim())) if contiguous else in_order_of_memory(fake)
    # The result of ``as_strided_scatter`` has the shape of its operand, so no permuted copy fits.
    movable = may_copy and node.target is not aten.as_strided_scatter.default
    whole = fake.untyped_storage().nbytes() == fake.numel() * fake.element_size()
    if order is None or not whole or not (movable or contiguous):
        raise CaptureError(
            f"{node.target} depends on the strides of its input, which is expanded, a part of a "
            "larger tensor, or in another order of memory and written"
        )
    if not may_copy:
        return
    with graph.inserting_before(node):
        permuted = graph.call_function(aten.permute.default, (operand, list(order)))
        permuted.meta = {**node.meta, "val": fake.permute(order)}
        memory = graph.call_function(
            aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format}
        )
        memory.meta = dict(permuted.meta)
    node.replace_input_with(operand, memory)


def _written_by(node: fx.Node) -> Iterator[int]:
    if isinstance(node.target, OpOverload):
        yield from _storages(written_by(node.target, node.args, node.kwargs))


def _storages(value: Any) -> Iterator[int]:
    """Yield the storages that the nodes in ``value`` had in the recording."""
    for node in pytree.tree_leaves(value):
        found = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(found, torch.Tensor):
            yield storage_key(found)

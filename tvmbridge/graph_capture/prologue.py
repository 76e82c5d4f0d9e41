"""The eager prologue: the subgraph that random draws depend on, run by PyTorch before the call.

A draw such as ``multinomial(softmax(x))`` reads values that the graph computes. The subgraph that
such draws depend on is extracted, together with all draws in program order. PyTorch runs it before
each call, and the draws are inputs of the compiled code.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.core.reached import reached
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import ComputedTensor, EagerPrologue, NoiseDescriptor, TensorSpec
from tvmbridge.graph_capture.noise import dropout_arguments

aten = torch.ops.aten


def cut_prologue(
    graph: fx.Graph, noise: Sequence[NoiseDescriptor], constants: Mapping[str, torch.Tensor]
) -> EagerPrologue | None:
    """Return the subgraph that draws depend on; None if no draw reads computed values."""
    nodes = {node.name: node for node in graph.nodes}
    read = [nodes[tensor.name] for descriptor in noise for tensor in descriptor.computed]
    if not read:
        return None
    draws = {_drawing_node(nodes[descriptor.name]): descriptor for descriptor in noise}
    cut = _Cut(nodes, draws, constants)
    needed = _ancestors(read, draws)
    for node in graph.nodes:
        if node in draws:
            cut.draw(node, is_read=node in needed)
        elif node in needed:
            cut.copy(node)
    return cut.prologue()


def _drawing_node(node: fx.Node) -> fx.Node:
    """Return the drawing node of a descriptor's ``node``, which may be a getitem of its results."""
    if node.target is not operator.getitem:
        return node
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _ancestors(read: Sequence[fx.Node], draws: Mapping[fx.Node, NoiseDescriptor]) -> set[fx.Node]:
    """Return the nodes ``read`` and all their transitive inputs.

    The search continues through the inputs of dropout, but not of other draws: the inputs whose
    values these read are in ``read`` already.
    """

    def inputs(node: fx.Node) -> Sequence[fx.Node]:
        stops = node in draws and draws[node].drop_probability is None
        return [] if stops else node.all_input_nodes

    return set(reached(read, inputs))


class _Cut:
    """A prologue under construction, with a map from captured nodes to its own nodes."""

    def __init__(
        self,
        nodes: Mapping[str, fx.Node],
        draws: Mapping[fx.Node, NoiseDescriptor],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.graph = fx.Graph()
        self._root = torch.nn.Module()
        self._nodes = nodes
        self._draws = draws
        self._constants = constants
        self._values: dict[fx.Node, Any] = {}
        self._reads: list[str] = []
        self._drawn: list[fx.Node] = []

    def copy(self, node: fx.Node) -> None:
        """Copy a node that draws nothing into the prologue."""
        if node in self._values:
            return
        if node.op == "placeholder" and node.name in self._constants:
            self._root.register_buffer(node.name, self._constants[node.name], persistent=False)
            self._values[node] = self.graph.get_attr(node.name)
        elif node.op == "placeholder":
            self._reads.append(node.name)
            self._values[node] = self.graph.placeholder(node.name)
        elif node.target is operator.getitem and isinstance(self._source(node), tuple):
            self._values[node] = self._source(node)[node.args[1]]
        else:
            self._values[node] = self.graph.node_copy(node, self._values.__getitem__)

    def _source(self, item: fx.Node) -> Any:
        return self._values[item.args[0]]  # type: ignore[index]

    def draw(self, node: fx.Node, *, is_read: bool) -> None:
        """Add the draw of ``node``.

        For dropout the draw is the mask; its product with the input is added only if a later draw
        reads it (``is_read``).
        """
        descriptor = self._draws[node]
        args, kwargs = pytree.tree_map(self._argument, (descriptor.args, dict(descriptor.kwargs)))
        drawn = self.graph.call_function(descriptor.op, tuple(args), dict(kwargs))
        if descriptor.result is not None:
            drawn = self.graph.call_function(operator.getitem, (drawn, descriptor.result))
        self._drawn.append(drawn)
        if descriptor.drop_probability is None:
            value = self._nodes[descriptor.name]
            self._values[value] = self._in_dtype(drawn, value.meta["val"].dtype)
        elif is_read:
            self._values[node] = self._dropout(node, drawn)

    def _in_dtype(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.graph.call_function(aten.to.dtype, (value, dtype))

    def _dropout(self, node: fx.Node, mask: fx.Node) -> Any:
        x, p, _ = dropout_arguments(node)
        keep = self._in_dtype(mask, x.meta["val"].dtype)
        scaled = self.graph.call_function(aten.mul.Scalar, (keep, 1.0 / (1.0 - p)))
        kept = self.graph.call_function(aten.mul.Tensor, (self._values[x], scaled))
        return kept if node.target is aten.dropout.default else (kept, mask)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, ComputedTensor):
            return self._values[self._nodes[value.name]]
        if not isinstance(value, TensorSpec):
            return value
        return self.graph.call_function(
            aten.empty_strided.default,
            (list(value.shape), list(value.stride)),
            {"dtype": value.dtype, "device": value.device},
        )

    def prologue(self) -> EagerPrologue:
        """Return the finished prologue."""
        self.graph.output(tuple(self._drawn))
        self.graph.lint()
        return EagerPrologue(fx.GraphModule(self._root, self.graph), tuple(self._reads))

"""Cut the graph of one micro-batch into stages, each a module of its own.

A stage's module takes the values that cross the cut before it and the inputs that it needs; it
returns the values that cross the cut after it. It uses the parameters of the given module under
numbered names, so that equal stages have equal graphs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.reached import reached
from tvmbridge.core.torch_private import pytree
from tvmbridge.distributed.graph import PipelineGraph, is_random, value_of, written

# Replaces the device arguments of operators in a stage's key: each rank uses its own device.
_INDEX = re.compile(r"(?<=device\(type='cuda'), index=\d+(?=\))")


@dataclass(frozen=True)
class OutputSource:
    """The origin of a stage's output: ``made`` in the stage, ``received``, or a ``constant``."""

    kind: str
    value: Any


@dataclass(frozen=True)
class StageModule:
    """One stage: its module, and the tensors that it exchanges with the others.

    - ``names``: for each tensor attribute of ``module``, the name in the user's module.
    - ``used_inputs``: the indices of the flattened inputs that it takes after the received values.
    - ``received``, ``sent``: fake tensors of the values that cross the cuts.
    """

    index: int
    module: fx.GraphModule
    names: dict[str, str]
    used_inputs: tuple[int, ...]
    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    outputs: tuple[OutputSource, ...]
    random: bool
    operators: int
    writes: bool

    @property
    def key(self) -> str:
        """A text that is equal for stages with equal operators and shapes, on any rank."""
        tensors = [*self.module.state_dict().values(), *self.received]
        shapes = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors]
        return f"{_INDEX.sub('', self.module.code)}\n{shapes}\n{self.used_inputs}"


def cut(
    graph: PipelineGraph, positions: Sequence[int], devices: Sequence[torch.device] | None = None
) -> list[StageModule]:
    """Cut the graph into stages that begin at ``positions``; the first position is 0."""
    ends = [*positions[1:], len(graph.nodes)]
    return [
        cut_stage(graph, i, start, end, None if devices is None else devices[i])
        for i, (start, end) in enumerate(zip(positions, ends, strict=True))
    ]


def cut_stage(
    graph: PipelineGraph, index: int, start: int, end: int, device: torch.device | None = None
) -> StageModule:
    """Build the stage of ``graph.nodes[start:end]``, with constants of the graph on ``device``."""
    last = end == len(graph.nodes)
    received = graph.crossing(start)
    wanted: Sequence[Any] = graph.outputs if last else graph.crossing(end)
    builder = _Builder(graph, device)
    for node in received:
        builder.placeholder(node)
    for node in graph.inputs:
        builder.inputs[node] = None
    used = _used_inputs(graph, graph.nodes[start:end], wanted if last else ())
    for i in used:
        builder.placeholder(graph.inputs[i])
    for node in graph.nodes[start:end]:
        builder.copy(node)
    sources, made = _sources(wanted, received, builder)
    builder.graph.output(tuple(made))
    module = fx.GraphModule(builder.root, builder.graph)
    module.train(True)
    return StageModule(
        index=index,
        module=module,
        names=builder.names,
        used_inputs=tuple(used),
        received=tuple(value_of(n) for n in received),
        sent=() if last else tuple(value_of(n) for n in wanted),
        outputs=tuple(sources),
        random=any(is_random(n) for n in graph.nodes[start:end]),
        operators=end - start,
        writes=any(written(n) for n in graph.nodes[start:end]),
    )


def _sources(
    wanted: Iterable[Any], received: Sequence[fx.Node], builder: _Builder
) -> tuple[list[OutputSource], list[fx.Node]]:
    sources: list[OutputSource] = []
    made: list[fx.Node] = []
    for value in wanted:
        if not isinstance(value, fx.Node):
            sources.append(OutputSource("constant", value))
        elif value in received:
            sources.append(OutputSource("received", received.index(value)))
        else:
            sources.append(OutputSource("made", len(made)))
            made.append(builder.copy(value))
    return sources, made


def _used_inputs(
    graph: PipelineGraph, nodes: Sequence[fx.Node], outputs: Sequence[Any]
) -> list[int]:
    read = [read for node in nodes for read in node.all_input_nodes]
    read += [n for n in outputs if isinstance(n, fx.Node)]
    needed = reached(read, lambda n: n.all_input_nodes if n in graph.recomputed else ())
    return [i for i, node in enumerate(graph.inputs) if node in needed]


class _Builder:
    """Copies nodes into a graph of their own, with the recomputed nodes that they need."""

    def __init__(self, graph: PipelineGraph, device: torch.device | None) -> None:
        self.source = graph
        self.device = device
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.names: dict[str, str] = {}
        self.inputs: dict[fx.Node, None] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[int, str] = {}

    def placeholder(self, node: fx.Node) -> None:
        made = self.graph.placeholder(f"x{len(self.copies)}")
        made.meta["val"] = value_of(node)
        self.copies[node] = made

    def copy(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            if node.op == "get_attr":
                self.copies[node] = self._attribute(str(node.target))
            else:
                self.copies[node] = self._call(node)
        return self.copies[node]

    def _call(self, node: fx.Node) -> fx.Node:
        assert node.op == "call_function", f"{node.op} {node.name}"
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.copy)
        if self.device is not None:
            args, kwargs = pytree.tree_map(self._moved, (args, kwargs))
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        # Not where it comes from: stages that do the same are to be the same graph.
        made.meta["val"] = value_of(node)
        return made

    def _moved(self, value: Any) -> Any:
        return self.device if isinstance(value, torch.device) else value

    def _attribute(self, name: str) -> fx.Node:
        tensor = self.source.tensors[name]
        attribute = self._attributes.get(id(tensor))
        if attribute is None:
            attribute = f"t{len(self._attributes)}"
            self._attributes[id(tensor)] = attribute
            self.names[attribute] = name
            if isinstance(tensor, nn.Parameter):
                self.root.register_parameter(attribute, tensor)
            else:
                self.root.register_buffer(attribute, tensor)
        return self.graph.get_attr(attribute)

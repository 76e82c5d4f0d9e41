"""The captured program, run node by node by PyTorch: its values and the adjoint of each."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tvmbridge.core.types import NoiseDescriptor
from tvmbridge.graph_capture.noise import dropout_arguments
from tvmbridge.inspect.compare.trace import Trace, TraceBuilder, tensors_in, user_source

aten = torch.ops.aten


@dataclass(frozen=True)
class _Edge:
    """A use of a value: the tensor that the reader got, who reads and who made it."""

    alias: torch.Tensor
    reader: fx.Node
    made_by: int


@dataclass
class ProgramRun:
    """State of one run of an fx graph.

    Args:
        graph: a functional ATen graph.
        inputs: values of its placeholders and attributes, by node name.
        draws: values of the random draws that stand in the graph, by node name.
    """

    graph: fx.Graph
    inputs: Mapping[str, torch.Tensor]
    draws: Mapping[str, torch.Tensor]
    noise: Sequence[NoiseDescriptor] = ()
    differentiated: bool = False
    values: dict[fx.Node, Any] = field(default_factory=dict)
    numbers: dict[fx.Node, list[int]] = field(default_factory=dict)
    trace: TraceBuilder = field(default_factory=TraceBuilder)
    edges: list[_Edge] = field(default_factory=list)

    def run(self) -> None:
        """Evaluate every node."""
        with torch.set_grad_enabled(self.differentiated):
            for node in self.graph.nodes:
                if node.op in ("placeholder", "get_attr"):
                    self._given(node)
                elif node.op == "call_function":
                    self._call(node)

    def number(self, name: str) -> int:
        """The number of the step of the node called ``name``."""
        (node,) = (n for n in self.numbers if n.name == name)
        return self.numbers[node][0]

    def value(self, name: str) -> torch.Tensor:
        """The value of the node called ``name``, connected to the inputs."""
        (node,) = (n for n in self.values if n.name == name)
        value: torch.Tensor = self.values[node]
        return value

    def _given(self, node: fx.Node) -> None:
        if node.name in self.inputs:
            value = self.inputs[node.name]
            self.values[node] = value
            self.numbers[node] = [self.trace.given(node.name, value)]

    def _call(self, node: fx.Node) -> None:
        numbers = [n for i in node.all_input_nodes for n in self.numbers.get(i, [])]
        if node.target is operator.getitem and node.name not in self.draws:
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]
            held = tensors_in(self.values[source])  # type: ignore[index]
            made = [
                number
                for tensor, number in zip(held, self.numbers[source], strict=True)  # type: ignore[index]
                if tensor is self.values[node]
            ]
            self.numbers[node] = made
            return
        value = self._evaluate(node)
        self.values[node] = value
        source_line = user_source(node.meta.get("stack_trace"))
        self.numbers[node] = [
            self.trace.computed(node.name, str(node.target), source_line, numbers, t)
            for t in tensors_in(value)
        ]

    def _evaluate(self, node: fx.Node) -> Any:
        draw = self.draws.get(node.name)
        if draw is None:
            args = fx.map_arg(node.args, lambda n: self._read(n, node))
            kwargs = fx.map_arg(node.kwargs, lambda n: self._read(n, node))
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.target in (aten.dropout.default, aten.native_dropout.default):
            x, p, _ = dropout_arguments(node)
            value = self._read(x, node)
            kept = value * (draw.to(value.dtype) * (1.0 / (1.0 - p)))
            return kept if node.target is aten.dropout.default else (kept, draw.to(torch.bool))
        return draw

    def _read(self, node: fx.Node, reader: fx.Node) -> Any:
        """The value of ``node``; each use of one that is differentiated is a tensor of its own."""
        value = self.values[node]
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        alias = value.view_as(value)
        self.edges.append(_Edge(alias, reader, self.numbers[node][0]))
        return alias

    def differentiate(
        self,
        outputs: Mapping[str, str],
        cotangents: Mapping[str, torch.Tensor],
        wanted: Mapping[str, torch.Tensor],
    ) -> None:
        """Append the adjoints: of each use of a value, of each value, and the gradients.

        Args:
            outputs: node names of the results by the results' names.
            cotangents: the gradients that arrive, by the results' names.
            wanted: the leaves whose gradients are results, by name.
        """
        flowing = {n: self.value(node) for n, node in outputs.items() if n in cotangents}
        flowing = {n: value for n, value in flowing.items() if value.requires_grad}
        if not flowing:
            return
        made = [
            (node, value)
            for node, value in self.values.items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        asked = [e.alias for e in self.edges] + [v for _, v in made] + list(wanted.values())
        arriving = [cotangents[name] for name in flowing]
        found = torch.autograd.grad(list(flowing.values()), asked, arriving, allow_unused=True)
        _Adjoints(self, outputs, cotangents).append(
            found[: len(self.edges)], [n for n, _ in made], found[len(self.edges) :]
        )
        for name, gradient in zip(wanted, found[len(self.edges) + len(made) :], strict=True):
            if gradient is not None:
                self._result(f"gradient of {name}", wanted[name], gradient)

    def _result(self, name: str, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        node = next((n for n, value in self.values.items() if value is leaf), None)
        number = None if node is None else self.trace.results.get(f"adjoint of {node.name}")
        if number is None:
            number = self.trace.computed(name, "result", "", (), gradient)
        self.trace.results[name] = number

    def build(self) -> Trace:
        """The trace, with the results that were noted."""
        kept = {n: i for n, i in self.trace.results.items() if not n.startswith("adjoint of ")}
        return Trace(tuple(self.trace.steps), kept)


@dataclass
class _Adjoints:
    """Adjoints in the order of backward: the readers of a value before the value."""

    run: ProgramRun
    outputs: Mapping[str, str]
    cotangents: Mapping[str, torch.Tensor]

    def append(
        self,
        partials: Sequence[torch.Tensor | None],
        nodes: Sequence[fx.Node],
        adjoints: Sequence[torch.Tensor | None],
    ) -> None:
        """Add a step for each partial (through one reader) and for each sum of them."""
        trace = self.run.trace
        of_node = dict(zip(nodes, adjoints, strict=False))
        by_maker: dict[int, list[int]] = {}
        arriving = {
            self.outputs[name]: trace.given(f"cotangent of {name}", cotangent)
            for name, cotangent in self.cotangents.items()
            if name in self.outputs
        }
        readers: dict[fx.Node, list[tuple[_Edge, torch.Tensor]]] = {}
        for edge, partial in zip(self.run.edges, partials, strict=True):
            if partial is not None:
                readers.setdefault(edge.reader, []).append((edge, partial))
        for node in reversed(list(self.run.graph.nodes)):
            adjoint = of_node.get(node)
            if adjoint is not None:
                made = self.run.numbers[node][0]
                operands = by_maker.get(made, [])
                if node.name in arriving:
                    operands = [*operands, arriving[node.name]]
                if len(operands) != 1 or not trace.steps[operands[0]].value.equal(adjoint):
                    number = trace.computed(
                        f"adjoint of {node.name}", "sum of adjoints", "", operands, adjoint
                    )
                else:
                    number = operands[0]
                trace.results[f"adjoint of {node.name}"] = number
            self._partials_through(node, readers.get(node, []), by_maker)

    def _partials_through(
        self,
        node: fx.Node,
        partials: Sequence[tuple[_Edge, torch.Tensor]],
        by_maker: dict[int, list[int]],
    ) -> None:
        trace = self.run.trace
        arrived = [
            trace.results[name]
            for name in (f"adjoint of {n.name}" for n in [node, *node.users])
            if name in trace.results and (name == f"adjoint of {node.name}" or _is_item(node, name))
        ]
        read = [n for i in node.all_input_nodes for n in self.run.numbers.get(i, [])]
        source = user_source(node.meta.get("stack_trace"))
        for edge, partial in partials:
            number = trace.computed(
                f"adjoint of {trace.steps[edge.made_by].name} through {node.name}",
                f"gradient of {node.target}",
                source,
                [*arrived, *read, *self.run.numbers.get(node, [])],
                partial,
            )
            by_maker.setdefault(edge.made_by, []).append(number)


def _is_item(node: fx.Node, name: str) -> bool:
    return any(u.target is operator.getitem and name == f"adjoint of {u.name}" for u in node.users)

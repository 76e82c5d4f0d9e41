"""Run the captured program node by node in PyTorch, and record its values and its backward's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from tvmbridge.core.reached import reached
from tvmbridge.frontend.origins import user_source
from tvmbridge.graph_capture.noise import dropout_arguments, is_active_dropout
from tvmbridge.inspect.compare.recorder import Recorder
from tvmbridge.inspect.compare.trace import Trace, tensors_in

aten = torch.ops.aten


class ProgramRun(fx.Interpreter):
    """One run of a functional ATen graph; each node is a step of the trace.

    Backward is recorded operator by operator. The operators that compute the gradient of a node
    are recorded as ``gradient of`` the node's operator.

    Args:
        draws: the values of the random draws in the graph, by node name.
    """

    def __init__(self, module: fx.GraphModule, draws: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.recorder = Recorder()
        self._draws = draws
        self._known: set[Any] = set()

    @property
    def trace(self) -> Trace:
        """The values recorded so far."""
        return self.recorder.trace

    def run_on(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run on the placeholders' values by name, and return the values of all nodes by name."""
        arguments = [inputs.get(n.name) for n in self.graph.find_nodes(op="placeholder")]
        self.run(*arguments, enable_io_processing=False)
        return {node.name: value for node, value in self.env.items()}

    def run_node(self, n: fx.Node) -> Any:
        """Compute the value of a node, and record it."""
        value = self._drawn(n) if n.name in self._draws else super().run_node(n)
        if n.op in ("placeholder", "get_attr"):
            for tensor in tensors_in(value):
                self.trace.add(tensor)
        elif n.op != "output" and not (n.target is getitem and n.name not in self._draws):
            source = user_source(n.meta.get("stack_trace"))
            operands = tensors_in([self.env[i] for i in n.all_input_nodes])
            for tensor in tensors_in(value):
                self.trace.add(tensor, str(n.target), operands, source)
                self._name_backward(tensor.grad_fn, f"gradient of {n.target}", source)
        return value

    def _drawn(self, node: fx.Node) -> Any:
        draw = self._draws[node.name]
        if not is_active_dropout(node):
            return draw
        x, p, _ = dropout_arguments(node)
        kept = self.env[x] * (draw.to(self.env[x].dtype) * (1.0 / (1.0 - p)))
        return kept if node.target is aten.dropout.default else (kept, draw.to(torch.bool))

    def _name_backward(self, function: Any, operator: str, source: str) -> None:
        """Record the backward of an operator's new autograd nodes under ``operator``."""
        recorder = self.recorder

        def begin(_: Any) -> None:
            recorder.operator, recorder.source, recorder.between = operator, source, False

        def end(*_: Any) -> None:
            recorder.between = True

        def new(nodes: Iterable[Any]) -> list[Any]:
            return [node for node in nodes if node is not None and node not in self._known]

        found = reached(new([function]), lambda n: new(other for other, _ in n.next_functions))
        self._known |= found.keys()
        for made in found:
            made.register_prehook(begin)
            made.register_hook(end)

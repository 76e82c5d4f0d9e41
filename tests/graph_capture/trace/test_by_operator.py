"""Programs decomposed operator by operator, against PyTorch's ``run_decompositions``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn import functional
from torch.utils import _pytree as pytree

from tests.models import TransformerLayer
from tests.thinned import thinned
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.graph_capture import capture as capturing
from tvmbridge.graph_capture.any_size import traced_with_symbols
from tvmbridge.graph_capture.capture import capture
from tvmbridge.graph_capture.ones import described_at
from tvmbridge.graph_capture.trace import by_operator, operator_traces


class Stack(nn.Module):
    """Equal layers, of which ``change`` may make one different."""

    def __init__(self, change: Callable[[list[TransformerLayer]], Any] = len) -> None:
        super().__init__()
        layers = [TransformerLayer() for _ in range(2)]
        change(layers)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _tie(layers: list[TransformerLayer]) -> None:
    layers[1].query.weight = layers[0].query.weight
    layers[1].key = layers[1].value


def _hook(layers: list[TransformerLayer]) -> None:
    layers[1].register_forward_hook(lambda module, args, result: result * 2)


def _other_constant(layers: list[TransformerLayer]) -> None:
    layers[1].first.eps = 1e-3
    layers[1].dropout.p = 0.5


def _bfloat16(layers: list[TransformerLayer]) -> None:
    for layer in layers:
        layer.to(torch.bfloat16)


class Various(nn.Module):
    """Lists of results, scalars of both signs of zero, strides, equal and different operands."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.split(2, dim=1)
        square, product = torch.matmul(x, x), torch.matmul(x, self.weight)
        signs = torch.clamp(x, min=-0.0) + torch.clamp(x, min=0.0)
        lasts = functional.softmax(square.t(), -1) + functional.softmax(square, -1)
        constant = torch.tensor([1.0, 0.5, 0.25, 0.0])
        kinds = x * 2 + x * 2.0 + (x > 0) * True
        parts = torch.cat([first, second * self.scale[:2]], 1).unbind(0)
        return signs, lasts + product, parts[1], kinds * constant, torch.std(x, dim=1)


class Convolutions(nn.Module):
    """Two equal blocks with batch norm in evaluation, and an interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU())
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return functional.interpolate(x, scale_factor=2.0, mode="bilinear").flatten(1)


class InPlace(nn.Module):
    """Writes into tensors of its own, whose views are read before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(x * 2)
        z = y.view(-1) + 1
        y += 3
        y *= y + z.view(y.shape)
        w = y.clone().clamp_(0, 1)
        dropped = functional.dropout(w, inplace=True)
        return functional.relu(dropped, inplace=True) + y + (w[0] + 1)


class Parameters(nn.Module):
    """Returns views of a parameter, and a result whose operator has more results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = functional.embedding_bag(torch.tensor([[0, 3], [1, 2]]), self.weight)
        return rows, functional.layer_norm(x, (4,), *self.weight[:2]), x + self.weight.t()


class Arithmetic(nn.Module):
    """Operators with one new result each, scalars and lists of operands among their arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, torch.exp(x) * 2, torch.cos(x) + x], 1)
        return torch.sum(torch.maximum(y, -y) ** 0.5, 1)


class Views(nn.Module):
    """Operators that become views or stay whole, on contiguous and on other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.convolution = nn.Conv2d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        parts = y.reshape(2, 2, 4).transpose(0, 1).unsqueeze(0)
        rows = parts.view(2, 2, 4).permute(2, 0, 1).select(0, 1).expand(3, 2, 2)
        images = self.convolution(parts.transpose(2, 3)[:, :, 1:])
        return torch.matmul(rows, y[:2, ::2]), images.squeeze(0), y.reshape(4, 4)


class ReadAfter(nn.Module):
    """Reads a view of a tensor after it has written into the tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        y += 3
        return row + y


class IntoView(nn.Module):
    """Writes into a view, and reads the view's base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0] += 3
        return y + 1


class IntoArgument(nn.Module):
    """Writes into its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2


class Statistics(nn.Module):
    """Writes buffers by an operator whose schema does not declare it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.variance, training=True)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each program that PyTorch decomposes as a whole."""
    found: list[str] = []
    genuine = ExportedProgram.run_decompositions

    def noted(program: ExportedProgram, *args: Any) -> Any:
        found.append("program")
        return genuine(program, *args)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", noted)
    return found


def _described(graph: CapturedGraph) -> list[Any]:
    """Return all that is read of a captured program, with the nodes by their numbers.

    PyTorch also records, and then removes, views that it does not read.
    """
    program = graph.program
    numbers = {node.name: f"node {i}" for i, node in enumerate(program.graph.nodes)}
    nodes = [
        (node.op, str(node.target), fx.map_arg((node.args, node.kwargs), lambda n: numbers[n.name]))
        for node in program.graph.nodes
    ]
    signature = program.graph_signature
    results = [numbers.get(getattr(s.arg, "name", ""), s) for s in signature.output_specs]
    outputs = [(o.kind, o.spec, o.target, o.value, o.alias) for o in graph.outputs]
    given = [str(spec) for spec in signature.input_specs]
    names = [sorted(program.constants), sorted(program.state_dict)]
    meta = [_meta(node) for node in program.graph.nodes]
    return [nodes, meta, results, given, names, graph.inputs, outputs, len(graph.noise)]


def _meta(node: fx.Node) -> tuple[Any, ...]:
    if node.op == "output":
        return ()
    value = pytree.tree_map_only(torch.Tensor, _metadata, node.meta.get("val"))
    return value, node.meta.get("nn_module_stack"), node.meta.get("stack_trace")


def _metadata(tensor: torch.Tensor) -> Any:
    laid = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return (*laid, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor).__name__)


def _as_whole(program: ExportedProgram, table: Any) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return program.run_decompositions(table)


CASES = {
    "tied": (lambda: Stack(_tie), (2, 5, 8), True),
    "hook": (lambda: Stack(_hook), (2, 5, 8), False),
    "constant": (lambda: Stack(_other_constant), (2, 5, 8), True),
    "bfloat16": (lambda: Stack(_bfloat16), (2, 5, 8), False),
    "various": (Various, (4, 4), True),
    "in place": (InPlace, (4, 4), True),
    "parameters": (Parameters, (4, 4), False),
    "arithmetic": (Arithmetic, (4, 4), True),
    "views": (Views, (4, 4), False),
    "views in training": (Views, (4, 4), True),
}


@pytest.mark.parametrize("case", thinned(CASES, 4))
def test_the_program_is_the_one_of_pytorch(
    case: str, whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape, training = CASES[case]
    module = make().train(training)
    x = torch.randn(*shape, dtype=torch.bfloat16 if case == "bfloat16" else None)
    found = capture(module, x, needs_grad=training)
    assert not whole
    monkeypatch.setattr(capturing, "decomposed", _as_whole)
    assert _described(found) == _described(capture(module, x, needs_grad=training))
    assert whole


def test_convolutions_in_evaluation(whole: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Convolutions().eval(), torch.randn(1, 3, 6, 6)
    x = x.contiguous(memory_format=torch.channels_last)
    found = capture(module, x)
    assert not whole
    monkeypatch.setattr(capturing, "decomposed", _as_whole)
    assert _described(found) == _described(capture(module, x))


@pytest.mark.parametrize("kind", [ReadAfter, IntoView, IntoArgument, Statistics])
def test_other_writes_are_left_to_pytorch(kind: type[nn.Module], whole: list[str]) -> None:
    capture(kind().eval(), torch.randn(4, 4), needs_grad=False)
    assert whole


def test_equal_calls_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    genuine = operator_traces.Traces._traced

    def noted(traces: Any, func: Any, *args: Any) -> Any:
        traced.append(str(func))
        return genuine(traces, func, *args)

    monkeypatch.setattr(operator_traces.Traces, "_traced", noted)
    capture(Stack().eval(), torch.randn(2, 5, 8))
    products = traced.count("aten.linear.default")
    assert products == 3  # of 8 features into 8, of 8 into 16, and of 16 into 8
    assert len(traced) < 20


@pytest.fixture
def traced_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """Return a list that grows by the graph of each operator that PyTorch's tracer traces."""
    graphs: list[torch.fx.Graph] = []
    genuine = operator_traces.traced_without_writes

    def noted(*args: Any) -> Any:
        graphs.append(genuine(*args))
        return graphs[-1]

    monkeypatch.setattr(operator_traces, "traced_without_writes", noted)
    return graphs


@pytest.mark.parametrize("kind", [Arithmetic, Views])
def test_operators_that_are_not_decomposed_need_no_trace(
    kind: type[nn.Module], traced_graphs: list[torch.fx.Graph]
) -> None:
    capture(kind().eval(), torch.rand(4, 4))
    assert not traced_graphs


class Sized(nn.Module):
    """Computes with sizes: in views, slices, a mask, a mean, and a size that is a product."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, length, width = x.shape
        windows = x[:, :-1].unfold(1, 2, 2).mean(-1)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        attended = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        longer = torch.cat([x, x[:, :3]], 1).view(rows, (length + 3) * width)
        return windows.cumsum(1), attended, longer.softmax(1), x.sum(1) / length


@pytest.mark.parametrize("module", thinned([Sized(), Stack().eval()], 2))
def test_traces_with_symbols_are_decomposed_alike(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("decomposed as a whole")

    def left_to_pytorch(*given: Any) -> Any:
        raise operator_traces.NotByOperatorError("for the test")

    def traced() -> Any:
        x = torch.randn(12, 34, 8)
        trace = traced_with_symbols(module, (x,), {}, [(0, 0), (0, 1)], needs_grad=False)
        guards = sorted(map(str, trace.relations.guards))
        values = trace.relations.symbols({0: (5, 9, 8)})
        return guards, str(trace.relations.shapes), described_at(trace.program, values)

    with monkeypatch.context() as patched:
        patched.setattr(ExportedProgram, "run_decompositions", refuse)
        ours = traced()
    monkeypatch.setattr(by_operator, "_by_operator", left_to_pytorch)
    assert ours == traced()


def test_operators_with_symbols_need_no_trace(traced_graphs: list[torch.fx.Graph]) -> None:
    sample = (torch.randn(12, 34, 8),)
    program = traced_with_symbols(
        Stack().eval(), sample, {}, [(0, 0), (0, 1)], needs_grad=False
    ).program
    assert len(program.graph.nodes) > 40
    assert not traced_graphs


class Masked(nn.Module):
    """Attention whose mask PyTorch reshapes to sizes that are no nodes of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


@pytest.mark.slow
def test_a_size_that_is_no_node_of_the_program_is_an_operand() -> None:
    sample = torch.randn(4, 8, 16), torch.zeros(4, 8, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = traced_with_symbols(Masked(), sample, {}, [(0, 1), (1, 1)], needs_grad=True)
    (result,) = traced.program.graph.output_node().args[0]
    assert result.meta["val"].shape[2] == 16

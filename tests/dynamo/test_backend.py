"""The backend of torch.compile: results, gradients, state and generator equal eager PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tests.dynamo.steps import assert_same
from tests.thinned import thinned
from tvmbridge import dynamo


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)


class Plain(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).relu() + x)


class Normed(Layer):
    """A layer with a batch norm, which writes buffers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.batch(self.linear(x)), 0.3, self.training).sin()


class Drawing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.randn_like(x) * torch.rand(8) * x.sigmoid()


class Aliasing(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x).relu().tanh()
        return y[0], y.view(-1), x, x.t(), self.linear.weight


class Writing(Layer):
    """A layer that writes into an argument, without a gradient."""

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.detach().sum(0))
        return self.linear(x).relu() * total


class Doubled(torch.autograd.Function):
    """A custom function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin() * 2

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * x.cos() * 3


class Custom(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(Doubled.apply(self.linear(x))) + 1


class Cast(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x).relu()
        return self.norm(y.float()).sum(-1)


MODULES = [
    Normed,
    Drawing,
    Aliasing,
    Custom,
    Cast,
]


def inputs(*, grad: bool = True) -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=grad)


@pytest.mark.parametrize("kind", thinned(MODULES, 3))
def test_training_steps(kind: type[nn.Module]) -> None:
    x = inputs(grad=False)
    assert_same(kind(), [[inputs()], [x], [inputs()], [x]])
    report = tvmbridge.compile_report()
    assert report.whole
    assert {graph.name for graph in report.graphs} == {kind.__name__}
    assert sum(graph.calls for graph in report.graphs) == 4


def test_a_report_without_graphs_says_why() -> None:
    torch.compiler.reset()
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    layers.compile(backend="tvmbridge")
    layers(inputs())
    if tvmbridge.compile_report().graphs:
        pytest.skip("since PyTorch 2.15 such a module is compiled in place")
    report = " ".join(str(tvmbridge.compile_report()).split())
    assert "module.compile() has no effect if the module's forward is PyTorch's own" in report


def test_breaks_of_another_backend_before_the_first_use_are_left_out() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return (x + 1).sin() * 2

    def use_another_backend() -> None:
        torch.compile(broken, backend="eager")(inputs())

    use_another_backend()
    torch.compiler.reset()
    tvmbridge.compile(Plain())(inputs())
    tvmbridge.compile(broken)  # a second use counts what came since the first
    assert tvmbridge.compile_report().whole
    use_another_backend()
    assert not tvmbridge.compile_report().whole


def test_written_arguments() -> None:
    assert_same(Writing(), [[inputs(), torch.zeros(8)] for _ in range(3)])
    assert tvmbridge.compile_report().whole


def test_inference_and_modes() -> None:
    with torch.no_grad():
        module = assert_same(Normed().eval(), [[inputs(grad=False)]] * 3)
    assert module.batch.num_batches_tracked == 0
    assert tvmbridge.compile_report().whole


@pytest.mark.parametrize("backend", [dynamo.tvmbridge_eager, dynamo.tvmbridge_aot])
def test_backends_that_stop_early(backend: Any) -> None:
    assert_same(Custom(), [[inputs()], [inputs()]], backend=backend)
    (graph,) = tvmbridge.compile_report().graphs
    assert graph.whole is (backend is dynamo.tvmbridge_aot)
    if graph.whole:
        assert graph.dispatches[0].specializations[0].cache == "off: nothing is compiled"
    else:
        assert "stops after the capture" in next(iter(graph.eager_calls))


@pytest.mark.parametrize("dynamic", thinned([True, None], 2))
def test_sizes_that_change(dynamic: bool | None) -> None:
    sizes = [4, 5, 7, 9]
    assert_same(Plain(), [[torch.randn(n, 8)] for n in sizes], dynamic=dynamic)
    report = tvmbridge.compile_report()
    assert report.whole
    # With dynamic=None Dynamo captures a symbolic graph at the second size. The last graph has one
    # specialization for each of its sizes.
    assert len(report.graphs) == (2 if dynamic is None else 1)
    assert (
        len(report.graphs[-1].dispatches[0].specializations) == len(sizes) - len(report.graphs) + 1
    )


def test_rows_that_a_graph_has_as_a_number_are_no_symbol() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 8)
            self.kinds: torch.Tensor
            self.register_buffer("kinds", torch.zeros(1, 64, dtype=torch.long))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            kinds = self.kinds[:, : ids.shape[1]].expand(ids.shape[0], ids.shape[1])
            return (self.table(ids) + self.table(kinds)).tanh() * 2

    lengths = [5, 7, 9, 11]
    assert_same(Positions(), [[torch.arange(4 * n).view(4, n) % 20] for n in lengths])
    report = tvmbridge.compile_report()
    assert report.whole
    assert [graph.calls for graph in report.graphs] == [1, 3]


def test_modules_of_one_class_share_code() -> None:
    for _ in range(3):
        assert_same(Normed(), [[inputs()]] * 3)
    (graph,) = tvmbridge.compile_report().graphs
    assert graph.whole
    assert graph.calls == 9
    assert len(graph.dispatches) == 3
    assert len({id(s.passes) for d in graph.dispatches for s in d.specializations}) == 1


def test_small_graphs_and_refused_ones_run_as_they_are() -> None:
    class Sorting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.quantize_per_tensor(x * 2 + 1, 0.1, 10, torch.qint8).dequantize() + 1

    x = torch.randn(4, 8)
    small = tvmbridge.compile(lambda v: v + 1)
    torch.testing.assert_close(small(x), x + 1)
    module = Sorting()
    torch.testing.assert_close(tvmbridge.compile(module)(x), module(x))
    report = tvmbridge.compile_report()
    assert not report.whole
    reasons = [reason for graph in report.graphs for reason in graph.eager_calls]
    assert reasons[0] == "it has fewer than 3 operators"
    assert len(reasons) == 2
    assert report.share == 0
    assert reasons[0] in str(report)
    torch.compiler.reset()
    assert tvmbridge.compile_report().graphs == ()


def test_calls_that_are_timed_or_step_aside_are_summed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TVMBRIDGE_ONLY_IF_FASTER", "1")

    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * 2 + 1) - x

    served = torch.compile(Small().eval(), backend="tvmbridge")
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(20):
            torch.testing.assert_close(served(x), torch.tanh(x * 2 + 1) - x)
    report = tvmbridge.compile_report()
    (graph,) = report.graphs
    assert report.timed_calls == graph.timed_calls > 0
    assert report.share == 1
    assert graph.calls + report.timed_calls + report.aside_calls == 20
    assert f"to time it: {report.timed_calls}" in str(report)


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="unknown compile options"):
        tvmbridge.compile(nn.ReLU(), speed=11)
    with pytest.raises(ValueError, match="joint"):
        tvmbridge.compile(nn.ReLU(), joint="other")
    compiled = torch.compile(Plain(), backend=dynamo.tvmbridge, mode="max-autotune")
    with pytest.raises(Exception, match="not known to tvmbridge"):
        compiled(inputs())


def test_options_reach_the_compiler() -> None:
    tvmbridge.compile(Plain(), joint="aot", fullgraph=True)(inputs()).sum().backward()
    (graph,) = tvmbridge.compile_report().graphs
    assert graph.dispatches[0].specializations[0].joint == "aot"

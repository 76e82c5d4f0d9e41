"""Random draws that depend on values: numbers, gradients and generator equal eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import assert_same_step, eager, sample
from tests.graph_capture.test_noise import Applied
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.calls.draw_noise import draw_noise
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.graph_capture.capture import capture

F = nn.functional


class Draws(nn.Module):
    """Random draws of every kind; other draws read some of them, and nothing reads others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        # Read only as the mean of a normal draw, so eager's gradient is 0, not None.
        self.mean = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.inner(x), 0.3, self.training)
        p = torch.sigmoid(y)
        torch.rand(2)
        index = torch.multinomial(p, 2)
        kept = torch.bernoulli(p) + torch.empty_like(p.t()).bernoulli_(p.t()).t()
        F.dropout(y, 0.5, True)
        torch.poisson(p)
        noise = torch.normal(self.mean, y.exp()) + torch.normal(y, 0.5) + torch.normal(1.0, p)
        steep = F.rrelu(y * kept, training=True) + F.rrelu(-y, 0.1, 0.2, self.training)
        counts = torch.poisson(torch.exp(steep)) + torch._standard_gamma(p + kept)
        torch.bernoulli(torch.sigmoid(counts))
        return steep * noise + counts + y.gather(1, index).sum(1, keepdim=True)


@pytest.fixture
def double() -> Draws:
    torch.manual_seed(0)
    return Draws().double()


def test_training_equals_eager(double: Draws) -> None:
    module = add_tvm_dispatch(double.train(), sample(4, 6).requires_grad_())
    reference = eager(module)
    for _ in range(2):
        assert_same_step(module, reference, sample(4, 6))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (2, {})
    assert double.mean.grad is not None
    assert not double.mean.grad.any()


class AfterDraws(nn.Module):
    """Draws whose shapes depend on tensors that are random draws themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.normal(F.dropout(x * self.weight, 0.5, self.training), 1.0)
        z = torch.rand_like(y) * torch.randn_like(torch.empty_like(x).uniform_())
        return z + y * self.weight


def test_draws_in_the_shapes_of_draws_equal_eager() -> None:
    module = add_tvm_dispatch(AfterDraws().double().train(), sample(4, 6).requires_grad_())
    for _ in range(2):
        assert_same_step(module, eager(module), sample(4, 6))
    assert not dispatch_report(module).fallbacks


def test_evaluation_equals_eager(double: Draws) -> None:
    module = add_tvm_dispatch(double.eval().requires_grad_(False), sample(4, 6))
    found = []
    for each in (module, eager(module)):
        torch.manual_seed(1)
        results = [each(sample(4, 6)) for _ in range(3)]
        found.append([*results, torch.get_rng_state()])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})


def test_draws_without_a_derivative_are_made_in_evaluation() -> None:
    def drawn(x: torch.Tensor, training: bool) -> torch.Tensor:
        total = torch.full_like(x, 9.0)
        return torch.binomial(total, torch.sigmoid(x)) + torch._sample_dirichlet(x.exp())

    module = add_tvm_dispatch(Applied(drawn).eval(), sample(4, 6))
    found = []
    for each in (module, eager(module)):
        torch.manual_seed(1)
        found.append([each(sample(4, 6)), each(sample(4, 6)), torch.get_rng_state()])
    torch.testing.assert_close(*found)
    assert dispatch_report(module).tvm_calls == 2


def test_the_head_is_what_draws_read_and_no_more(double: Draws) -> None:
    captured = capture(double.eval().requires_grad_(False), sample(4, 6))
    assert captured.prologue is not None
    assert len(captured.noise) == 13
    targets = [
        str(n.target) for n in captured.prologue.module.graph.nodes if n.op == "call_function"
    ]
    # The prologue has the draws and the operators before them, but none after the last draws.
    assert not any("gather" in t or "sum" in t for t in targets)
    assert targets.count("aten.multinomial.default") == 1
    inputs = {d.name: d for d in captured.inputs}
    values = [sample(*inputs[name].spec.shape).abs() for name in captured.prologue.reads]
    drawn = draw_noise(captured.noise, captured.prologue, values)
    assert [tuple(d.shape) for d in drawn] == [n.spec.shape for n in captured.noise]


def test_draws_of_metadata_alone_need_no_head() -> None:
    captured = capture(nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train(), torch.ones(2, 3))
    assert captured.noise
    assert captured.prologue is None


REFUSED: dict[str, tuple[Callable[[torch.Tensor, bool], torch.Tensor], str]] = {
    "a draw of another dtype than is foretold": (
        lambda x, t: torch.ops.aten.normal.Tensor_Tensor(x.float(), x.exp()),
        "of two dtypes",
    ),
    "a generator of its own": (
        lambda x, t: x + torch.rand(6, generator=torch.Generator().manual_seed(1)),
        "a torch.Generator of its own",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused(kind: str) -> None:
    function, reason = REFUSED[kind]
    x = sample(4, 6)
    if "dtype" in kind and function(x, x).dtype is function(x.to("meta"), x.to("meta")).dtype:
        pytest.skip("this PyTorch foretells the dtype")
    with pytest.raises(UnsupportedOperatorError, match=reason):
        add_tvm_dispatch(Applied(function).eval(), sample(4, 6))


def test_a_draw_that_eager_refuses_raises_as_in_eager() -> None:
    module = add_tvm_dispatch(Applied(lambda x, t: torch.bernoulli(x)).eval(), torch.rand(5))
    with pytest.raises(RuntimeError, match="p_in"):
        module(torch.full((5,), 2.0))

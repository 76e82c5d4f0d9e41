"""Training by each residual policy: gradients, bytes kept, writes before backward, the report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.residuals import ours as split_by_policy
from tests.joint_cases import CASES, Head
from tests.joint_steps import assert_same, assert_served, build, dispatched, step
from tests.thinned import thinned
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.coloring import POLICIES

OTHERS = [p for p in POLICIES if p != CompileOptions().residual_policy]


# Cases whose backward recomputes values; other tests run all cases by the default policy.
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *thinned((("masked attention", policy) for policy in OTHERS), 2),
        *(pytest.param("transformer", policy, marks=pytest.mark.slow) for policy in OTHERS[:2]),
    ],
)
def test_two_steps_equal_eager(name: str, policy: str) -> None:
    module, args = build(CASES[name])
    ours, _ = dispatched(module, args, "auto", policy)
    for _ in range(2):
        assert_same(step(ours, args), step(module, args))
    assert_served(ours, 2)


class Mlp(nn.Module):
    """Two layers, dropout, and an activation that is cheap enough to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))


@pytest.fixture(scope="module", params=list(POLICIES))
def trained(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    module = Mlp().double().train()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    return add_tvm_dispatch(module, x, options={"residual_policy": request.param})


def eager_of(module: nn.Module) -> nn.Module:
    other = Mlp().double().train()
    other.load_state_dict(module.state_dict())
    return other


def gradients_after(module: nn.Module, between: Callable[[Any, torch.Tensor], None]) -> Any:
    """Run a step with a write between forward and backward; return gradients or error message."""
    torch.manual_seed(3)
    module = copy.deepcopy(module)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    hidden = x * 1.0
    output = module(hidden)
    with torch.no_grad():
        between(module, hidden)
    try:
        output.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return [x.grad, *(p.grad for p in module.parameters())]


WRITES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "nothing": lambda m, x: None,
    "the input": lambda m, x: x.mul_(2.0),
    "a weight": lambda m, x: m.up.weight.mul_(2.0),
    "a bias": lambda m, x: m.up.bias.add_(1.0),
    "the other bias": lambda m, x: m.down.bias.add_(1.0),
    "the scale of the norm": lambda m, x: m.norm.weight.mul_(3.0),
    "the shift of the norm": lambda m, x: m.norm.bias.add_(3.0),
}


@pytest.mark.parametrize("write", thinned(WRITES, 2))
def test_a_write_before_backward_raises_or_changes_nothing(trained: nn.Module, write: str) -> None:
    ours = gradients_after(trained, WRITES[write])
    eager = gradients_after(eager_of(trained), WRITES[write])
    if isinstance(ours, str):
        assert "modified by an inplace operation" in ours
        assert write != "nothing"
    else:
        # Eager may raise for a write into a tensor that compiled code does not read.
        reference = gradients_after(eager_of(trained), WRITES["nothing"])
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-11)
        assert isinstance(eager, str) or write != "a weight"


class Scaled(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 6, dtype=torch.float64) + 0.5)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


# Eager PyTorch saves the result of each for backward.
SAVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": torch.prod,
    "prod of rows": lambda y: y.prod(1),
    "cumprod": lambda y: y.cumprod(1),
    "amax": lambda y: y.amax(1),
    "cholesky": lambda y: torch.linalg.cholesky(y @ y.mT + torch.eye(4, dtype=y.dtype)),
    "inv": lambda y: torch.linalg.inv(y[:, :4]),
    "logsumexp": lambda y: y.logsumexp(1),
}


@pytest.mark.parametrize("name", thinned(SAVED, 3))
def test_a_write_into_an_output_that_eager_saves_raises_or_changes_nothing(name: str) -> None:
    module = Scaled(SAVED[name])
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), [x, module.weight])
    add_tvm_dispatch(module, x)
    output = module(x)
    total = output.sum()
    output.detach().mul_(-3.0).add_(7.0)
    raised, found = "", expected
    try:
        found = torch.autograd.grad(total, [x, module.weight])
    except RuntimeError as error:
        raised = str(error)
    assert not raised or "modified by an inplace operation" in raised
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_backward_twice(trained: nn.Module) -> None:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    output = trained(x).sum()
    (first,) = torch.autograd.grad(output, x, retain_graph=True)
    (second,) = torch.autograd.grad(output, x)
    assert torch.equal(first, second)


def test_the_bytes_of_a_small_block() -> None:
    """Check the bytes: the first layer's output, the centered sum, 1/deviation, and the mask."""
    least = 4 * 64 * 4 + 4 * 8 * 4 + 4 * 4 + 4 * 8
    torch.manual_seed(0)
    module, x = Mlp().train(), torch.randn(4, 8)
    kept = {policy: parts.residual_bytes for policy, parts in split_by_policy(module, x).items()}
    assert kept["min_cut"] == least
    assert kept["save_all"] == least + 4 * 64 * 4 + 4 * 8 * 4
    assert least <= kept["recompute_cheap"] < kept["save_all"]
    add_tvm_dispatch(module, x, options={"residual_policy": "save_all"})
    (made,) = dispatch_report(module).specializations
    sizes = [r.spec.nbytes for r in made.residuals]
    assert made.residual_bytes == sum(sizes) == kept["save_all"]
    assert sizes == sorted(sizes, reverse=True)
    text = str(dispatch_report(module)).replace("\n", " ")
    assert f"kept for backward: {made.residual_bytes / 1e6:.1f} MB" in text
    assert made.residuals[0].made_by in text


class Largest(nn.Module):
    """A module that returns the row maxima of a product plus a bias, and the product."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> Any:
        product = x * self.w
        return (product + self.b).amax(1), product


@pytest.mark.parametrize(
    ("joint", "policy"),
    thinned([("aot", "min_cut"), *(("relax", p) for p in POLICIES)], 2),
)
def test_the_place_of_the_largest_is_found_again(joint: str, policy: str) -> None:
    """Check the gradient of the maximum, whose operand may be recomputed.

    If the recomputed sum rounded differently, no element would equal the maximum.
    """
    module = Largest().train()
    x = torch.randn(50, 64, requires_grad=True)
    ours, _ = dispatched(module, (x,), joint, policy)
    for made in (ours, module):
        made.zero_grad()
        largest, product = made(x)
        (largest.sum() + product.sum()).backward()
    torch.testing.assert_close(ours.w.grad, module.w.grad)
    assert torch.equal(ours.b.grad, module.b.grad)


def test_names_of_operators_are_checked() -> None:
    with pytest.raises(ValueError, match="recompute"):
        CompileOptions(recompute=("softmax",))
    with pytest.raises(ValueError, match="recompute"):
        CompileOptions(recompute="relax.nn.softmax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual_policy"):
        CompileOptions(residual_policy="least")


def test_softmax_runs_again_when_asked() -> None:
    kept = []
    for recompute in ((), ("relax.nn.softmax",)):
        module = Head(lambda m, x: (h := m.fc(x)) * torch.softmax(h, 1)).train()
        options = {"recompute": recompute}
        x = torch.randn(3, 6)
        reference = copy.deepcopy(module)
        add_tvm_dispatch(module, x, options=options)
        for made in (module, reference):
            made(x).sum().backward()
        torch.testing.assert_close(module.fc.weight.grad, reference.fc.weight.grad)
        (report,) = dispatch_report(module).specializations
        kept.append({r.made_by for r in report.residuals})
    assert "relax.nn.softmax" in kept[0]
    assert "relax.nn.softmax" not in kept[1]

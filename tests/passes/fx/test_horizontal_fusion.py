"""HorizontalFusion: the chains that become one, those it declines, and unchanged results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

from tests.fx_models import Chains, Recipe, assert_agree, copied
from tests.thinned import but_slow
from tvmbridge.core.pass_report import PassReport
from tvmbridge.passes.fx.costs import Costs
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion
from tvmbridge.passes.fx.run import run_fx_passes

FREE = Costs(launch=1.0, bytes_per_second=1e18)
VIEWS = {"aten::split", "aten::unflatten", "aten::flatten", "aten::narrow", "aten::slice"}
VIEWS |= {"aten::view", "aten::as_strided", "aten::select", "aten::movedim", "aten::permute"}


def traced(module: nn.Module, *args: Any) -> fx.GraphModule:
    sizes = tuple({0: torch.export.Dim.AUTO} for _ in args)
    program = torch.export.export(module, args, dynamic_shapes=sizes, strict=False)
    graph_module = program.module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


def traced_forward(module: nn.Module, *args: Any) -> fx.GraphModule:
    program = torch.export.export(module, args, strict=False)
    graph_module = program.module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


class Norms(nn.Module):
    def __init__(self, count: int, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(count)])
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.norms, x.split(self.width, 1), strict=True)
        return torch.cat([torch.tanh(norm(part)) for norm, part in pairs], 1)


def launches(call: Callable[[], Any]) -> int:
    """Return the number of kernels that a call launches in eager PyTorch, by its profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled, torch.no_grad():
        call()
    outermost = [e for e in profiled.events() if e.cpu_parent is None]
    return sum(e.name not in VIEWS for e in outermost)


def test_before_and_after() -> None:
    graph_module = traced_forward(Norms(3), torch.randn(2, 12))
    after = HorizontalFusion(costs=FREE)(graph_module).graph_module
    called = [str(n.target) for n in after.graph.nodes if n.op == "call_function"]
    assert called == [
        "aten.stack.default",
        "aten.stack.default",
        "aten.unflatten.int",
        "aten.layer_norm.default",
        "aten.addcmul.default",
        "aten.tanh.default",
        "aten.flatten.using_ints",
    ]


@pytest.mark.slow
def test_launches_of_a_hundred_chains() -> None:
    module, x = Norms(100), torch.randn(8, 400)
    graph_module = traced_forward(module, x)
    after = HorizontalFusion()(graph_module).graph_module
    assert launches(lambda: graph_module(x)) == 201
    assert launches(lambda: after(x)) == 5
    torch.testing.assert_close(after(x), module(x), rtol=0, atol=1e-6)


def test_the_input_stays_and_twice_changes_nothing() -> None:
    graph_module = traced_forward(Norms(3), torch.randn(2, 12))
    before = str(graph_module.graph)
    once = HorizontalFusion(costs=FREE)(graph_module)
    assert once.modified
    assert str(graph_module.graph) == before
    assert list(once.graph_module.state_dict()) == list(graph_module.state_dict())
    pairs = zip(once.graph_module.parameters(), graph_module.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    again = HorizontalFusion(costs=FREE)(once.graph_module)
    assert not again.modified
    assert again.graph_module is once.graph_module


class Declined(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.weights = nn.ParameterList([torch.randn(64, i + 1) for i in range(3)])

    def forward(self, x: torch.Tensor) -> Any:
        parts = x.split(64, 1)
        if self.what == "costs":
            pairs = zip(self.layers, parts, strict=True)
            return (torch.cat([torch.tanh(layer(part)) for layer, part in pairs], 1),)
        if self.what == "rule":
            return [torch.cumprod(part, 1) for part in parts]
        if self.what == "written":
            return [torch.tanh(part.mul_(2)) for part in parts]
        made: list[torch.Tensor] = []
        for part in parts:
            made.append(part * made[-1].sum() if made else part * part.sum())
        return made


@pytest.mark.parametrize(
    ("what", "costs", "reason"),
    [
        ("costs", Costs(1e-9, 1.0), "stacking 99840 bytes of weights for aten.linear.default"),
        ("costs", Costs(1e-3, 1e18), ""),
        ("rule", FREE, "there is no rule for aten.cumprod.default"),
        ("written", FREE, "written in place"),
        ("sequence", FREE, None),
    ],
)
def test_declines_with_the_reason(what: str, costs: Costs, reason: str | None) -> None:
    module = Declined(what).double()
    x = torch.randn(2, 192, dtype=torch.float64)
    report = PassReport()
    result = HorizontalFusion(costs=costs).apply(traced_forward(module, x.clone()), report)
    assert result.modified is (reason == "")
    assert reason is None or reason in "; ".join(report.declined)
    expected, made = module(x.clone()), result.graph_module(x.clone())
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_what_is_returned_shares_no_memory() -> None:
    recipe = Recipe(3, 4, 0, "split", ("tanh",), "both", 0, False)
    module, x = Chains(recipe), Chains(recipe).sample(2)
    after = HorizontalFusion(costs=FREE)(traced_forward(module, x)).graph_module
    with torch.no_grad():
        results = after(x)
        kept = [r.clone() for r in results]
        results[0].zero_()
    assert torch.equal(results[1], kept[1])
    assert torch.equal(results[2], kept[2])


def agrees(recipe: Recipe, training: bool) -> int:
    """Compare a model with its fused copy, at the traced size and at another size."""
    module = Chains(recipe).train(training)
    graph_module = traced(module, module.sample(3))
    after, records = run_fx_passes(graph_module, (HorizontalFusion(costs=FREE),))
    reference = copied(module)
    names = dict(module.named_parameters())
    for name, parameter in after.named_parameters():
        assert parameter is names[name]
    for rows in (3, 5):
        assert_agree(
            after, Ordered(reference, list(dict(after.named_parameters()))), module.sample(rows)
        )
    return records[0].rewrites


class Ordered(nn.Module):
    """A wrapper whose ``parameters()`` has a given order, not the order of use."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def parameters(self, recurse: bool = True) -> Any:
        found = dict(self.module.named_parameters())
        return iter([found[name] for name in self.names])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(4, 4, 0, "split", ("norm", "linear", "drop", "residual", "tanh"), "cat", 1, False),
        Recipe(3, 4, 2, "sizes", ("rms", "scale", "shift", "shared"), "cat", 2, True),
        Recipe(6, 4, 0, "unflatten", ("softmax", "drop", "linear", "norm"), "both", 3, True),
    ],
    ids=lambda r: r.end,
)
@pytest.mark.parametrize("training", but_slow([True, False], False))
def test_agrees_in_float64(recipe: Recipe, training: bool) -> None:
    assert agrees(recipe, training) > 0


_ANY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(_ANY, max_examples=6)
@given(Recipe.drawn())
def test_random_models(recipe: Recipe) -> None:
    agrees(recipe, training=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(_ANY, max_examples=200)
@given(Recipe.drawn())
def test_two_hundred_random_models(recipe: Recipe) -> None:
    agrees(recipe, training=bool(recipe.seed % 2))

"""Backward in parts has eager PyTorch's gradients, and hands them out as it proceeds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.thinned import thinned
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.gradient_parts import GradientParts, Handed

WIDTH = 8


class Net(nn.Module):
    """Attention, whose three projections become one product, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        y = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        # The weight of the last layer is read early, and by a view.
        z = x * self.last.weight.t().sum(1)
        return self.last(torch.tanh(y)) + z, self.other(x)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = Net().double().train()
    options = CompileOptions(gradient_parts=3, combine_matmuls="always", only_if_faster=False)
    ours = add_tvm_dispatch(copy.deepcopy(eager), data(), options=options)
    return eager, ours


def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    return {"x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def assert_close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def count_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []
    run = Handed._run

    def noted(self: Handed, part: Any, *args: Any) -> Any:
        ran.append(len(part.gradients))
        return run(self, part, *args)

    monkeypatch.setattr(Handed, "_run", noted)
    return ran


def used(outputs: tuple[torch.Tensor, ...], which: str) -> torch.Tensor:
    chosen = {"both": (0, 1), "first": (0,), "second": (1,)}[which]
    return torch.stack([outputs[i].square().sum() for i in chosen]).sum()


def trained(module: nn.Module, which: str, *, again: bool, recompute: bool) -> Any:
    module, x = copy.deepcopy(module), data()
    outputs = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    loss = used(outputs, which)
    if again:
        loss.backward(retain_graph=True)
    loss.backward()
    return gradients(module, x)


@pytest.mark.parametrize("which", thinned(["both", "first", "second"], 2))
@pytest.mark.parametrize("how", ["once", "again", "recompute"])
def test_gradients_are_those_of_eager(
    pair: tuple[nn.Module, nn.Module], which: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = count_parts(monkeypatch)
    settings = {"again": how == "again", "recompute": how == "recompute"}
    expected, ours = (trained(module, which, **settings) for module in pair)
    assert_close(ours, expected)
    whole = 3 if which == "both" else 0
    assert len(ran) == (2 * whole if how == "again" else whole)


def test_gradients_of_some_tensors_run_only_the_parts_that_they_need(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = count_parts(monkeypatch)
    for names in (["other.bias"], ["first.weight"], ["q.weight", "last.bias"]):
        found = []
        for module in pair:
            loss = used(module(data()), "both")
            found.append(torch.autograd.grad(loss, [module.get_parameter(n) for n in names]))
        assert_close(found[1], found[0])
    assert len(ran) < 9


def test_gradients_can_be_differentiated(pair: tuple[nn.Module, nn.Module]) -> None:
    found = []
    for module in pair:
        x = data()
        weights = list(module.parameters())
        first = torch.autograd.grad(used(module(x), "both"), [x, *weights], create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        found.append(torch.autograd.grad(total, [x, *weights], allow_unused=True))
    assert_close(found[1], found[0])


def test_the_default_dtype_may_change_before_backward(pair: tuple[nn.Module, nn.Module]) -> None:
    found = []
    for module in pair:
        loss, before = used(module(data()), "both"), torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            found.append(torch.autograd.grad(loss, list(module.parameters())))
        finally:
            torch.set_default_dtype(before)
    assert_close(found[1], found[0])


@pytest.mark.parametrize("versioned", [True, False])
def test_hooks_may_step_a_parameter_as_soon_as_its_gradient_is_there(
    pair: tuple[nn.Module, nn.Module], versioned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = count_parts(monkeypatch)

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            written = parameter if versioned else parameter.data
            written.sub_(parameter.grad, alpha=0.1)

    found = []
    for each in pair:
        module = copy.deepcopy(each)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            module.zero_grad()
            used(module(data()), "both").backward()
        found.append([p.detach() for p in module.parameters()])
        assert module is not pair[1] or not dispatch_report(module).fallbacks
    assert_close(found[1], found[0])
    assert len(ran) == 9


@pytest.mark.parametrize("name", ["q.weight", "first.weight"])
def test_a_write_into_what_a_later_part_reads_raises(
    pair: tuple[nn.Module, nn.Module], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With many parts the packed weights are read after the first one.
    monkeypatch.setattr(GradientParts, "now", lambda self: self._of(self._bytes / 8))
    for each in pair:
        module = copy.deepcopy(each)
        written = module.get_parameter(name)

        def writes(_: torch.Tensor, written: torch.Tensor = written) -> None:
            with torch.no_grad():
                written.mul_(2)

        module.get_parameter("other.bias").register_hook(writes)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            used(module(data()), "both").backward()


def test_backward_of_checked_calls_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_parts(monkeypatch)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    options = CompileOptions(gradient_parts=2, check="first", only_if_faster=False)
    add_tvm_dispatch(module, x, options=options)
    ran.clear()
    for count in (0, 2):
        module(x).sum().backward()
        assert len(ran) == count
    assert dispatch_report(module).tvm_calls == 2


def test_the_number_of_parts_must_be_positive() -> None:
    with pytest.raises(ValueError, match="gradient_parts must be at least 1"):
        CompileOptions(gradient_parts=0)

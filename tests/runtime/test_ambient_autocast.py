"""Calls under autocast are served by code for that autocast state, and agree with eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import Block, eager
from tvmbridge import CaptureError, add_tvm_dispatch, capture, dispatch_report

Context = Callable[[], AbstractContextManager[Any]]


def _autocast(dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype)


def _loss(output: torch.Tensor) -> torch.Tensor:
    """Return a weighted sum; the sum of squares of a norm's result has almost no gradient."""
    return (output.float().flatten() * torch.arange(output.numel()).cos()).sum()


def _step(
    module: nn.Module, x: torch.Tensor, context: Context, *, backward_within: bool = False
) -> list[torch.Tensor]:
    """Run one step with forward inside ``context``; return output and gradients."""
    module.zero_grad()
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    with context():
        output = module(x)
        loss = _loss(output)
        if backward_within:
            loss.backward()
    if not backward_within:
        loss.backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def _assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Assert equality up to bfloat16's rounding, since all values were bfloat16 once."""
    bound = torch.finfo(torch.bfloat16).eps
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=bound * float(b.detach().abs().max()))


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A module dispatched in train mode under autocast to bfloat16."""
    torch.manual_seed(1)
    module = Block().train()
    with _autocast():
        add_tvm_dispatch(module, torch.randn(6, 24))
    return module


def test_steps_are_those_of_eager_under_the_same_state(trained: nn.Module) -> None:
    module, x = copy.deepcopy(trained), torch.randn(6, 24)
    reference = eager(module)
    states: list[Context] = [_autocast, nullcontext, _autocast, lambda: _autocast(torch.float16)]
    for state in (*states, *states):
        _assert_same(_step(module, x, state), _step(reference, x, state))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (8, {})
    assert sorted({s.mode for s in report.specializations}) == [
        "train with gradients",
        "train with gradients, cpu autocast to bfloat16",
        "train with gradients, cpu autocast to float16",
    ]


def test_backward_may_run_within_the_region(trained: nn.Module) -> None:
    module, x = copy.deepcopy(trained), torch.randn(6, 24)
    reference = eager(module)
    for _ in range(3):
        ours = _step(module, x, _autocast, backward_within=True)
        _assert_same(ours, _step(reference, x, _autocast, backward_within=True))
    for _ in range(2):  # backward under autocast of a call outside autocast
        losses = []
        for net in (module, reference):
            torch.manual_seed(0)
            losses.append(_loss(net(x)))
        with _autocast():
            for loss, net in zip(losses, (module, reference), strict=True):
                net.zero_grad()
                loss.backward()
        grads = [[p.grad for p in net.parameters()] for net in (module, reference)]
        _assert_same(*grads)  # type: ignore[arg-type]
    assert dispatch_report(module).fallbacks == {}


def test_a_region_that_is_off_is_as_none(trained: nn.Module) -> None:
    module, x = copy.deepcopy(trained), torch.randn(6, 24)
    with _autocast(), torch.autocast("cpu", enabled=False):
        assert module(x).dtype is torch.float32
    assert module(x).dtype is torch.float32
    assert dispatch_report(module).tvm_calls == 2


class Regions(nn.Module):
    """A forward with two regions: one turns autocast off, one selects another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            exact = self.first(x)
        with torch.autocast("cpu", torch.float16):
            other = self.second(exact)
        return exact, other, self.third(x) + self.third(exact)


def test_regions_within_forward_are_those_of_eager() -> None:
    torch.manual_seed(1)
    module, x = Regions().train(), torch.randn(4, 8)
    reference = copy.deepcopy(module)
    with _autocast():
        add_tvm_dispatch(module, x)
    for _ in range(3):
        found = []
        for net in (module, reference):
            net.zero_grad()
            with _autocast():
                results = net(x)
            sum(r.float().square().mean() for r in results).backward()
            found.append([*results, *(p.grad for p in net.parameters())])
        _assert_same(*found)
    assert dispatch_report(module).fallbacks == {}


@pytest.mark.slow
def test_second_derivatives_are_those_under_it() -> None:
    torch.manual_seed(1)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).train(), torch.randn(3, 4)
    reference = copy.deepcopy(module)
    with _autocast():
        add_tvm_dispatch(module, x)
    found = []
    for net in (module, reference):
        given = x.clone().requires_grad_()
        with _autocast():
            output = net(given)
        (slope,) = torch.autograd.grad(output.float().sum(), given, create_graph=True)
        slope.square().sum().backward()
        found.append([slope.detach(), *(p.grad for p in net.parameters() if p.grad is not None)])
    _assert_same(*found)
    assert dispatch_report(module).tvm_calls == 1


NORMS: dict[str, tuple[Callable[[], tuple[nn.Module, ...]], tuple[int, ...]]] = {
    "layer norm": (lambda: (nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)), (6, 8)),
    "batch norm": (lambda: (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 8, 8)),
    "group norm": (lambda: (nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), (2, 3, 8, 8)),
}


# Quick tests have one norm in each place.
@pytest.mark.parametrize(
    ("within", "name"),
    [
        (False, "layer norm"),
        (True, "batch norm"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((False, "batch norm"), (True, "layer norm"), (False, "group norm"))
        ),
    ],
)
def test_norms_train(within: bool, name: str) -> None:
    class Under(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)  # type: ignore[no-any-return]

    torch.manual_seed(1)
    make, shape = NORMS[name]
    module: nn.Module = nn.Sequential(*make()).train()
    module, x = Under(module) if within else module, torch.randn(*shape)
    reference = copy.deepcopy(module)
    around: Context = nullcontext if within else _autocast
    with around():
        add_tvm_dispatch(module, x.clone().requires_grad_())
    for _ in range(3):
        _assert_same(_step(module, x, around), _step(reference, x, around))
    for a, b in zip(module.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})


def test_what_cannot_be_compiled_under_it_is_refused_at_once() -> None:
    class Selects(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0] * 2

    x = torch.randn(4, 8)
    add_tvm_dispatch(Selects().eval(), x)
    with _autocast(), pytest.raises(CaptureError, match="under autocast"):
        add_tvm_dispatch(Selects().eval(), x, on_break="forward")


def test_a_trace_leaves_no_casts_behind() -> None:
    module, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    with _autocast():
        expected = module(x)
        captured = capture(module, x)
        add_tvm_dispatch(module, x)
        with torch.no_grad():
            torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(eager(module)(x), expected)
    assert captured.assumptions.autocast == (("cpu", torch.bfloat16),)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_a_region_within_forward_may_stand_in_another() -> None:
    class Within(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with _autocast():
                return super().forward(x)

    module = Within().train()
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module)
    x = torch.randn(6, 24)
    for state in (lambda: torch.autocast("cpu", enabled=False), nullcontext):
        _assert_same(_step(module, x, state), _step(reference, x, state))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (2, {})

"""State that forward changes outside of tensors: Python changes it, between compiled parts."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.reasons import Kind

CALLS = 6


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class Stateful(nn.Module):
    """Runs a function that changes its state."""

    def __init__(self, change: Any, **state: Any) -> None:
        super().__init__()
        self.layers, self.change = _layers(), change
        self.__dict__.update(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.layers(x))


def _recalled(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.memory.append(y.detach())
    return y * len(m.memory) + m.memory[0]


def _logged(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.log[f"call {len(m.log)}"] = y.shape[0]
    return y * 2


def _stepped(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.steps = m.steps + 1
    return y * float(m.steps)


def _flipped(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.flag = not m.flag
    return y * 2 if m.flag else y.sin()


def _trained(module: Any, seed: int) -> list[Any]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in module.parameters())]


def _assert_counts_alike(served: Any, eager: Any, calls: int) -> None:
    """Assert that both modules return the same, and count alike in ``steps``, in each call."""
    with torch.no_grad():
        for _ in range(calls):
            x = torch.randn(3, 4)
            torch.testing.assert_close(served(x), eager(x))
            assert (served.steps, type(served.steps)) == (eager.steps, int)


def _reasons(served: Any) -> set[Kind]:
    return {reason.kind for reason in dispatch_report(served).reasons.values()}


@pytest.mark.parametrize("kept", [pytest.param("out", marks=pytest.mark.slow), "detached"])
def test_a_hook_that_writes_into_a_dictionary_is_called_between_parts(kept: str) -> None:
    eager: Any = _layers()
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    found: list[dict[str, torch.Tensor]] = []
    for module in (eager, served):
        features: dict[str, torch.Tensor] = {}

        def hook(
            layer: Any, args: Any, out: torch.Tensor, into: dict[str, torch.Tensor] = features
        ) -> None:
            into[kept] = out if kept == "out" else out.detach()

        module[1].register_forward_hook(hook)
        found.append(features)
    for seed in range(CALLS):
        torch.testing.assert_close(_trained(served, seed), _trained(eager, seed))
        torch.testing.assert_close(found[1], found[0])
    assert dispatch_report(served).tvm_calls >= CALLS - 1


@pytest.mark.slow
def test_a_flag_that_forward_turns_has_parts_for_both_values() -> None:
    eager = Stateful(_flipped, flag=False)
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for seed in range(CALLS):
        torch.testing.assert_close(_trained(served, seed), _trained(eager, seed))
        assert served.flag == eager.flag
    assert dispatch_report(served).tvm_calls >= CALLS - 2


@pytest.mark.slow
def test_a_bounded_deque_forgets_as_in_python() -> None:
    # TorchDynamo forgets the limit of a deque that it gets.
    eager: Any = Stateful(_recalled, memory=deque(maxlen=2))
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for seed in range(CALLS):
        torch.testing.assert_close(_trained(served, seed), _trained(eager, seed))
        assert len(served.memory) == len(eager.memory) <= 2


def _placed(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.rows[:, m.steps : m.steps + 1] = y[:, None]
    m.steps = m.steps + 1
    return torch.tanh(m.rows[:, : m.steps] * 2 - y[:, None]) / 3


@pytest.mark.slow
def test_a_counter_that_decides_sizes_is_an_input() -> None:
    eager: Any = Stateful(_placed, steps=0, rows=torch.zeros(3, 20, 3))
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    _assert_counts_alike(served, eager, calls=12)
    assert Kind.PARTS_ANEW not in _reasons(served)


def _growing(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.steps = m.steps * 2**20 + 1
    return torch.tanh(y[:, : m.steps % 3 + 1] * 2 - 1)


@pytest.mark.slow
def test_a_counter_beyond_64_bits_is_exact() -> None:
    eager: Any = Stateful(_growing, steps=1)
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    _assert_counts_alike(served, eager, calls=6)
    assert served.steps > 2**64


@pytest.mark.slow
def test_a_number_of_numpys_stays_one() -> None:
    # TorchDynamo makes an array of it.
    eager: Any = Stateful(_stepped, steps=numpy.int64(1))
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for seed in range(4):
        torch.testing.assert_close(_trained(served, seed), _trained(eager, seed))
        assert (type(served.steps), served.steps) == (numpy.int64, eager.steps)


@pytest.mark.slow
def test_parts_that_each_call_would_compile_anew_end() -> None:
    eager = Stateful(_logged, log={})
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for seed in range(14):
        torch.testing.assert_close(_trained(served, seed), _trained(eager, seed))
        assert served.log == eager.log
    assert Kind.PARTS_ANEW in _reasons(served)
    assert len(dispatch_report(served).parts) <= 8


def _remembered(m: Any, y: torch.Tensor) -> torch.Tensor:
    memory = y if m.memory is None else torch.cat([m.memory, y])
    m.memory = memory.detach()
    return torch.tanh(memory.softmax(0) * 2) @ memory.mT


@pytest.mark.slow
def test_a_state_that_grows_at_each_call_is_served_in_parts() -> None:
    eager = Stateful(_remembered, memory=None)
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for seed in range(CALLS):
        torch.testing.assert_close(_trained(served, seed), _trained(eager, seed))
        torch.testing.assert_close(served.memory, eager.memory)
    report = dispatch_report(served)
    assert "shape" in report.cut
    assert report.tvm_calls >= CALLS - 2

"""Tensors in containers that one call leaves in an attribute are inputs of the next call's code."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.thinned import but_slow
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report

KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda h, c: (h, c), lambda s: s),
    "list": (lambda h, c: [h, c], lambda s: s),
    "dict": (lambda h, c: {"h": h, "c": c}, lambda s: (s["h"], s["c"])),
    "nested": (lambda h, c: ((h, len(h)), [c]), lambda s: (s[0][0], s[1][0])),
    "same": (lambda h, c: (h, h), lambda s: s),
    "views": (lambda h, c: tuple(torch.stack([h, c])), lambda s: s),
}


class Remembering(nn.Module):
    """Keeps its state in a container, which it replaces at each call."""

    def __init__(self, kind: str, detached: bool = True, halves: bool = False) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 3)
        self.kind, self.detached, self.halves = kind, detached, halves
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        put, taken = KINDS[self.kind]
        h, c = (x.new_zeros(len(x), 3),) * 2 if self.state is None else taken(self.state)
        if self.halves and self.state is not None:
            h.mul_(0.5)
        c = c.sigmoid() + h
        h = torch.tanh(self.cell(torch.cat([x, h], 1))) * c
        self.state = put(h.detach(), c.detach()) if self.detached else put(h, c)
        return h * 2


def _pair(module: nn.Module) -> tuple[Any, Any]:
    eager = module.double()
    served = copy.deepcopy(eager)
    add_tvm_dispatch(served)
    return eager, served


def _step(modules: tuple[Any, Any], xs: Tensor) -> None:
    found = []
    for module in modules:
        module.zero_grad()
        results = [module(x) for x in xs]
        torch.stack(results).square().sum().backward()
        grads = [p.grad.clone() for p in module.parameters()]
        found.append((results, grads, torch.utils._pytree.tree_leaves(module.state)))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "tuple" else pytest.mark.slow) for k in KINDS]
)
def test_a_state_in_a_container_is_an_input(kind: str) -> None:
    pair = _pair(Remembering(kind))
    for _ in range(5):
        _step(pair, torch.randn(1, 2, 3, dtype=torch.float64))
    report = dispatch_report(pair[1])
    assert report.tvm_calls == 4
    assert len(report.specializations) == 1
    copied = copy.deepcopy(pair)
    for module in pair:
        module.state = None
    _step(copied, torch.randn(1, 2, 3, dtype=torch.float64))
    for _ in range(2):
        _step(pair, torch.randn(1, 2, 3, dtype=torch.float64))
    assert dispatch_report(copied[1]).tvm_calls == 1
    assert dispatch_report(pair[1]).tvm_calls == 5


@pytest.mark.slow
def test_gradients_flow_through_a_state_in_a_tuple() -> None:
    pair = _pair(Remembering("tuple", detached=False))
    for _ in range(3):
        for module in pair:
            module.state = None
        _step(pair, torch.randn(4, 2, 3, dtype=torch.float64))
    assert dispatch_report(pair[1]).tvm_calls == 9


def test_a_state_that_the_script_replaces_is_read() -> None:
    pair = _pair(Remembering("tuple"))
    for n in range(6):
        if n > 2:
            state = torch.randn(2, 2, 3, dtype=torch.float64)
            for module in pair:
                module.state = (state[0].clone(), state[n % 2].clone())
        _step(pair, torch.randn(1, 2, 3, dtype=torch.float64))
    assert dispatch_report(pair[1]).tvm_calls == 5


@pytest.mark.slow
def test_writes_into_a_state_that_shares_memory_are_right() -> None:
    pair = _pair(Remembering("same", halves=True))
    for _ in range(4):
        _step(pair, torch.randn(1, 2, 3, dtype=torch.float64))


class Comparing(nn.Module):
    """Asks whether the two tensors of its state are one."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is not None:
            h, c = self.state
            x = x + (h if h is c else h + c)
        self.state = (x.sin(), x.cos())
        return x


def test_whether_two_tensors_of_a_state_are_one_is_compared() -> None:
    eager = Comparing()
    served, x = copy.deepcopy(eager), torch.ones(2)
    add_tvm_dispatch(served)
    with torch.no_grad():
        for n in range(5):
            for module in (eager, served) if n == 3 else ():
                module.state = (module.state[0],) * 2
            torch.testing.assert_close(served(x), eager(x))
    assert "one tensor is given twice" in " ".join(dispatch_report(served).fallbacks)
    assert dispatch_report(served).tvm_calls == 3


class Compared(nn.Module):
    """Asks whether two of its tensors are one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.h = torch.ones(2)
        self.c = self.h if tied else torch.ones(2)
        self.weight = self.bias = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.weight if self.weight is self.bias else self.h)
        return x + (self.h if self.h is self.c else self.h + self.c)


def test_whether_two_attributes_are_one_is_compared() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="one tensor is given twice"):
        add_tvm_dispatch(Compared(tied=True), (x,))
    module = add_tvm_dispatch(Compared(tied=False), (x,))
    assert torch.equal(module(x), x + 3)
    module.h = module.c = torch.full((2,), 5.0)
    assert torch.equal(module(x), x + 6)
    assert dispatch_report(module).tvm_calls == 1


def test_a_container_that_the_script_changes_is_read() -> None:
    pair = _pair(Remembering("list"))
    for n in range(7):
        for module in pair:
            if n:
                module.state[0] = torch.full((2, 3), n / 8, dtype=torch.float64)
        _step(pair, torch.randn(1, 2, 3, dtype=torch.float64))
    assert dispatch_report(pair[1]).tvm_calls >= 4


class _Deep(Remembering):
    """Keeps its state in more containers than guards compare."""

    def forward(self, x: Tensor) -> Tensor:
        h, n = (x.new_zeros(len(x), 3), 1) if self.state is None else self.state[0][0][0][0]
        h = torch.tanh(self.cell(torch.cat([x, h], 1))) * n
        self.state = (((((h.detach(), n + 1),),),),)
        return h * 2


class _Comparing(Remembering):
    """Asks whether both of its tensors are one."""

    def forward(self, x: Tensor) -> Tensor:
        h, c = (x.new_zeros(len(x), 3),) * 2 if self.state is None else self.state
        h = torch.tanh(self.cell(torch.cat([x, h], 1))) * (2 if h is c else 3)
        self.state = (h.detach(),) * 2
        return h * 2


@pytest.mark.parametrize("kind", but_slow([_Deep, _Comparing], _Deep))
def test_a_state_that_cannot_be_an_input_is_right(kind: type[Remembering]) -> None:
    pair = _pair(kind("tuple"))
    for _ in range(4):
        _step(pair, torch.randn(1, 2, 3, dtype=torch.float64))


def test_no_graph_of_a_state_is_kept() -> None:
    pair = _pair(Remembering("tuple", detached=False))
    for module in pair:
        states = []
        for _ in range(6):
            module(torch.randn(2, 3, dtype=torch.float64))
            states.append(weakref.ref(module.state[0]))
        module.state = None
        gc.collect()
        assert not any(state() is not None for state in states)

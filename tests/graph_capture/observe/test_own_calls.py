"""Other threads' changes of generators and settings during a capture are not forward's effects."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report


def _set_and_reset() -> None:
    for benchmark in (True, False):
        torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.use_deterministic_algorithms(False)


_EFFECTS: dict[str, Callable[[], Any]] = {
    "torch draws": lambda: torch.rand(3),
    "torch seeds": lambda: torch.manual_seed(3),
    "python draws": random.random,
    "numpy draws": lambda: numpy.random.rand(2),
    "settings": _set_and_reset,
}


@contextmanager
def _meanwhile(effect: Callable[[], Any]) -> Iterator[None]:
    """A context in which another thread calls ``effect`` repeatedly."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(0.0002):
            effect()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Drawing(nn.Module):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.draw()
        return x * 2


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    # PyTorch's test utilities, which other tests import, forbid to set flags of cuDNN.
    with torch.backends.__allow_nonbracketed_mutation():
        yield
        torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("name", _EFFECTS)
def test_effect_of_another_thread_is_not_forwards(name: str) -> None:
    module, x = nn.Sequential(nn.Dropout(0.3), nn.Tanh()), torch.randn(4)
    with _meanwhile(_EFFECTS[name]):
        add_tvm_dispatch(module, x)
        module(x)
    assert dispatch_report(module).tvm_calls == 1


@pytest.mark.parametrize("name", [n for n in _EFFECTS if n != "torch draws"])
def test_forwards_own_effect_is_refused_beside_another_thread(name: str) -> None:
    effects = {**_EFFECTS, "settings": lambda: setattr(torch.backends.cudnn, "benchmark", True)}
    with _meanwhile(lambda: None), pytest.raises(CaptureError, match="forward of _Drawing"):
        add_tvm_dispatch(_Drawing(effects[name]), torch.randn(4))
    assert not torch.backends.cudnn.benchmark


class _Copied(nn.Module):
    """A module whose deep copy calls ``effect``."""

    def __init__(self, effect: Callable[[], Any]) -> None:
        super().__init__()
        self.effect = effect

    def __deepcopy__(self, memo: Any) -> _Copied:
        self.effect()
        return _Copied(self.effect)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_seed_and_setting_of_another_thread_last() -> None:
    go, seeded = threading.Event(), threading.Event()
    found: list[Any] = []

    def seed() -> None:
        go.wait()
        torch.manual_seed(11)
        torch.backends.cudnn.benchmark = True
        seeded.set()
        captured.wait()
        found.extend((torch.rand(2), torch.backends.cudnn.benchmark))

    captured = threading.Event()
    thread = threading.Thread(target=seed)
    thread.start()
    add_tvm_dispatch(_Copied(lambda: (go.set(), seeded.wait())), torch.randn(4))
    captured.set()
    thread.join()
    torch.manual_seed(11)
    assert torch.equal(found[0], torch.rand(2))
    assert found[1]

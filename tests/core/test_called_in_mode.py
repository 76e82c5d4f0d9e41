"""The thread's modes are restored after a call in another mode, even if a signal handler raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.interrupts.storm import interrupted_often
from tvmbridge.core.called_in_mode import with_autocast_off, with_gradients, without_gradients


def test_the_function_runs_in_the_other_mode() -> None:
    assert not without_gradients(torch.is_grad_enabled)
    assert with_gradients(torch.is_grad_enabled)
    with torch.no_grad():
        assert with_gradients(torch.is_grad_enabled)
        assert not without_gradients(torch.is_grad_enabled)
        assert not torch.is_grad_enabled()
    with torch.autocast("cpu"), torch.autocast("cuda", enabled=False):
        assert not with_autocast_off(torch.is_autocast_enabled, "cpu")
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("call", [without_gradients, with_gradients])
def test_an_exception_restores_the_mode(call: Callable[..., None]) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            with pytest.raises(KeyboardInterrupt):
                call(fail)
            assert torch.is_grad_enabled() is enabled


def test_no_interrupt_leaves_gradients_off() -> None:
    def step() -> None:
        for _ in range(20):
            without_gradients(int)

    left = 0
    for _ in interrupted_often(step, seconds=1):
        left += not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    assert not left


def test_no_interrupt_leaves_autocast_off() -> None:
    def step() -> None:
        for _ in range(20):
            with_autocast_off(int)

    left = 0
    with torch.autocast("cpu"):
        for _ in interrupted_often(step, seconds=1):
            left += not torch.is_autocast_enabled("cpu")
            torch.set_autocast_enabled("cpu", True)
    assert not left

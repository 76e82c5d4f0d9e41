"""A forward that leaves PyTorch settings changed is refused by name; the settings are restored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.backends import ContextProp
from torch.overrides import TorchFunctionMode

from tvmbridge import CaptureError, add_tvm_dispatch
from tvmbridge.graph_capture.observe.settings import Settings, settings_kept


class Doubling(TorchFunctionMode):
    """A user's function mode."""


@pytest.fixture(autouse=True)
def _flags_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow setting backend flags, which PyTorch's own test tools forbid once imported."""
    monkeypatch.setitem(ContextProp.__set__.__globals__, "flags_frozen", lambda: False)


LEAVES: dict[str, Callable[[], object]] = {
    "the gradient mode": lambda: torch.set_grad_enabled(False),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("cpu"),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast of cpu": lambda: torch.autocast("cpu").__enter__(),
    "the dtype of autocast of cpu": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "the precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "the flushing of denormals": lambda: torch.set_flush_denormal(True),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "a function mode that it entered": lambda: Doubling().__enter__(),
}


class Leaving(nn.Module):
    """Changes a setting after the last operator of forward."""

    def __init__(self, leave: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        self.leave()
        return y


@pytest.mark.parametrize("name", LEAVES)
def test_what_is_left_changed_is_refused_by_name(name: str) -> None:
    before = Settings()
    # An open autocast region also changes the nesting count, which the error names first.
    named = "the nesting of autocast" if name == "autocast of cpu" else name
    with pytest.raises(CaptureError, match=f"leaves {named} changed"):
        add_tvm_dispatch(Leaving(LEAVES[name]), torch.ones(3))
    assert not before.changed()


def test_autocast_that_is_never_left_keeps_no_weights_cached() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="leaves the nesting of autocast changed"):
        add_tvm_dispatch(Leaving(LEAVES["autocast of cpu"]), torch.ones(3))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert linear(torch.ones(2)).dtype is dtype


def _and_back() -> None:
    with torch.autocast("cpu"), torch.no_grad():
        torch.set_num_threads(torch.get_num_threads())
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)


def test_what_is_changed_back_is_served() -> None:
    module = add_tvm_dispatch(Leaving(_and_back), torch.ones(3))
    torch.testing.assert_close(module(torch.full((3,), 2.0)), torch.full((3,), 2.0))


def test_errors_leave_nothing_changed() -> None:
    guards = []

    def fail(settings: Settings) -> None:
        torch.set_warn_always(True)
        guards.append(torch.inference_mode())
        guards[0].__enter__()
        torch.set_default_device("meta")
        names = ["the default device", "the gradient mode", "inference mode", "warn_always"]
        assert settings.changed() == names
        raise KeyError

    settings = Settings(lambda: True)
    with pytest.raises(KeyError), settings_kept(lambda: True) as kept:
        fail(kept)
    assert not settings.changed()
    assert torch.zeros(1).device.type == "cpu"

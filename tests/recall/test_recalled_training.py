"""Recalled code trains as eager PyTorch does, and code that is no data is captured as before."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.recall.models import SOURCE, load
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.recall import RECALLED

_NAME = "recalled_training"
_OPTIONS = {"recall": True, "measure_kernels": False}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    sys.modules.pop(_NAME, None)


def _model(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = load(folder, SOURCE, _NAME).Model()
    return module.double()


def _x() -> torch.Tensor:
    return torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


def _step(module: nn.Module, both: bool) -> list[torch.Tensor]:
    torch.manual_seed(5)
    module.zero_grad()
    z, sums = module(_x())
    loss = z.square().mean() + (sums["sum"].mean() if both else 0)
    loss.backward()
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [z.detach(), sums["sum"].detach(), *grads, torch.get_rng_state()]


def test_training_without_capture(folder: Path) -> None:
    first = add_tvm_dispatch(_model(folder), (_x(),), options=_OPTIONS)
    assert (
        dispatch_report(first)
        .specializations[0]
        .recalled.endswith("nothing is kept for this graph")
    )
    module = _model(folder)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (_x(),), options=_OPTIONS)
    assert dispatch_report(module).specializations[0].recalled == RECALLED
    # The backward without one of the cotangents is compiled from the graph on disk.
    for both in (True, False, False, False, False):
        ours, theirs = _step(module, both), _step(eager, both)
        assert len(ours) == len(theirs)
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)
    report = dispatch_report(module)
    assert report.fallbacks == {}
    assert report.specializations[0].partial_backwards == 1


_WRITES = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x):
        result = torch.tanh(self.linear(x)) * self.scale.clone()
        self.scale.mul_(1.5)
        self.calls.add_(1)
        return result
"""


def test_second_derivatives_without_capture(folder: Path) -> None:
    """Check a forward that reads a buffer's value before it writes the buffer."""
    found = []
    for name in ("captured", "recalled", "eager"):
        torch.manual_seed(0)
        module = load(folder, _WRITES, _NAME).Model().double()
        if name != "eager":
            add_tvm_dispatch(module, (_x(),), options=_OPTIONS)
            told = dispatch_report(module).specializations[0].recalled
            assert (told == RECALLED) == (name == "recalled")
        weights = list(module.parameters())
        for _ in range(2):
            results = module(_x()).square().sum()
        first = torch.autograd.grad(results, weights, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), weights)
        found.append([*second, module.scale, module.calls])
    for ours in found[:2]:
        torch.testing.assert_close(ours, found[2], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_backward_in_halves_without_capture(folder: Path) -> None:
    """Check halves that are compiled from the backward on disk."""
    add_tvm_dispatch(_model(folder), (_x().requires_grad_(),), options=_OPTIONS)
    module = _model(folder)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (_x().requires_grad_(),), options=_OPTIONS)
    for _ in range(4):
        found = [_halves(module), _halves(eager)]
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    (report,) = dispatch_report(module).specializations
    assert report.recalled == RECALLED
    assert report.backward_halves == {"whole": 1, "inputs": 3, "weights": 3}


def _halves(module: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(5)
    x = _x().requires_grad_()
    z, sums = module(x)
    outputs = [z, sums["sum"]]
    cotangents = [torch.cos(o.detach()) for o in outputs]
    found = torch.autograd.grad(outputs, [x], cotangents, retain_graph=True)
    return [*found, *torch.autograd.grad(outputs, list(module.parameters()), cotangents)]


class _Sets(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 1
        return x + 1


class _Closes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        lock: Any = object()
        self.function = lambda x: x * (2 if lock else 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class _Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(self.flag) else x


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_Sets(), "attributes that forward sets"),
        (_Closes(), "a builtins.object"),
        (_Asks(), "values of buffers or arguments that forward reads"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_captured(module: nn.Module, reason: str) -> None:
    for _ in range(2):
        copied = copy.deepcopy(module.eval())
        add_tvm_dispatch(copied, (_x(),), options=_OPTIONS)
        told = dispatch_report(copied).specializations[0].recalled
        assert told.startswith("captured: ")
        assert reason in told
        assert torch.equal(copied(_x()), module(_x()))


_PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from recalled_training import Model
from tvmbridge import add_tvm_dispatch, dispatch_report
torch.manual_seed(0)
module = Model().eval()
x = torch.linspace(-1, 1, 32).reshape(4, 8)
with torch.no_grad():
    expected = module(x)[0]
    add_tvm_dispatch(module, (x,), options={"measure_kernels": False})
    torch.testing.assert_close(module(x)[0], expected)
print(dispatch_report(module).specializations[0].recalled)
"""


@pytest.mark.slow
def test_two_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_RECALL", "1")
    path = folder / f"{_NAME}.py"

    def told(source: str) -> str:
        path.write_text(source)
        command = [sys.executable, "-B", "-c", _PROGRAM, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert told(SOURCE).startswith("captured: ")
    assert told(SOURCE) == RECALLED
    changed = SOURCE.replace("SCALE = 2.0", "SCALE = 3.0")
    assert told(changed) == "captured: something that forward names is another"
    assert told(changed) == RECALLED

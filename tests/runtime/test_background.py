"""Compilation in the background: eager PyTorch serves meanwhile, and calls raise no failures."""

from __future__ import annotations

import copy
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report
from tvmbridge.core.reasons import Kind
from tvmbridge.kernels import table
from tvmbridge.runtime import child as children
from tvmbridge.runtime.entry_compiler import Compiler

COMPILING = Kind.COMPILING.sentence
X = torch.linspace(-1, 1, 48).reshape(8, 6)
BACKGROUND = {"background": True}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(children, "NICENESS", 0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make compiling child processes hang until they are killed."""
    of_now = os.getpid()
    compiled = Compiler._logged

    def told(*args: Any) -> Any:
        while os.getpid() != of_now:
            time.sleep(60)
        return compiled(*args)

    monkeypatch.setattr(Compiler, "_logged", told)


class Network(nn.Module):
    """A network with dropout, running statistics, and an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.5))
        self.activation = lambda x: x.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.activation(self.layers(x))
        return y


def _pair() -> tuple[nn.Module, nn.Module]:
    eager = Network()
    return eager, copy.deepcopy(eager)


def _step(module: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Run one training step; return result, gradients, buffers and the next random numbers."""
    torch.manual_seed(seed)
    module.zero_grad()
    result = module(x)
    result.square().sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [result.detach(), *gradients, *map(torch.clone, module.buffers()), torch.rand(3)]


def _assert_same(module: nn.Module, eager: nn.Module, x: torch.Tensor, seed: int) -> None:
    expected = _step(eager, x, seed)
    torch.testing.assert_close(_step(module, x, seed), expected, rtol=1e-4, atol=1e-5)


def test_eager_serves_until_code_is_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tvmbridge")
    eager, module = _pair()
    add_tvm_dispatch(module, options=BACKGROUND)
    _assert_same(module, eager, X, 0)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks, report.advice) == (0, {COMPILING: 1}, None)
    assert "compiling Network ((8, 6) float32)" in report.under_way[0]
    assert "in the background" in str(report)
    tvmbridge.wait(module)
    for seed in (1, 2):
        _assert_same(module, eager, X, seed)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (2, {COMPILING: 1})
    assert report.specializations[0].cache == "hit"
    assert report.under_way == ()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    told = [r.message for r in caplog.records if r.name.endswith("runtime.background")]
    assert "by process" in told[0]
    assert "has ended" in told[1]


def _small() -> tuple[nn.Module, nn.Module]:
    eager = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5))
    return eager, copy.deepcopy(eager)


def test_a_new_mode_does_not_wait() -> None:
    eager, module = _small()
    add_tvm_dispatch(module, X, options={"background": 120.0})
    module.forward.code.background.budget = 0.0
    eager.eval()
    module.eval()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(X), eager(X), rtol=1e-4, atol=1e-5)
            tvmbridge.wait(module)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (1, {COMPILING: 1})
    assert [s.cache for s in report.specializations] == ["hit", "hit"]


def test_a_budget_bounds_the_wait(held: None) -> None:
    eager, module = _pair()
    start = time.monotonic()
    add_tvm_dispatch(module, X, budget=0.3)
    assert 0.3 <= time.monotonic() - start < 50.0  # the child hangs for a minute
    _assert_same(module, eager, X, 0)
    with pytest.raises(TimeoutError, match="compiling Network"):
        tvmbridge.wait(module, timeout=0.1)
    tvmbridge.remove_tvm_dispatch(module)


def test_a_child_that_is_killed_is_a_reason(held: None) -> None:
    eager, module = _pair()
    add_tvm_dispatch(module, X, options=BACKGROUND)
    (job,) = module.forward.code.background._jobs.values()
    os.kill(job.child.pid, signal.SIGKILL)
    tvmbridge.wait(module)
    for seed in range(3):
        _assert_same(module, eager, X, seed)
    (reason,) = dispatch_report(module).fallbacks
    assert "SIGKILL" in reason
    assert dispatch_report(module).fallbacks[reason] == 3


def test_a_child_that_hangs_is_ended(held: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = _pair()
    add_tvm_dispatch(module, X, options=BACKGROUND)
    monkeypatch.setattr(children, "MOST_SECONDS", 0.2)  # earlier, the child might end before
    tvmbridge.wait(module, timeout=60.0)
    module(X)
    (reason,) = dispatch_report(module).fallbacks
    assert "nothing was heard of it" in reason


class Branching(nn.Module):
    """A branch by a parameter, which cannot be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if self.scale > 0 else x - 1


def test_what_cannot_be_compiled_is_told_as_at_a_call() -> None:
    at_call, module = Branching(), Branching()
    add_tvm_dispatch(at_call, on_fallback="silent")
    add_tvm_dispatch(module, options=BACKGROUND, on_fallback="silent")
    for _ in range(2):
        assert torch.equal(module(X), at_call(X))
        tvmbridge.wait(module)
    (expected,) = dispatch_report(at_call).fallbacks
    assert dispatch_report(module).fallbacks == {COMPILING: 1, expected: 1}
    with pytest.raises(CaptureError):
        add_tvm_dispatch(Branching(), X, budget=60, on_break="forward")


@pytest.mark.slow
def test_training_with_sizes_that_change() -> None:
    eager, module = _small()
    add_tvm_dispatch(module, dynamic_shapes="auto", options=BACKGROUND)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (module, eager)]
    for seed, rows in enumerate((8, 7, 8, 5, 4, 7, 3, 7, 8)):
        _assert_same(module, eager, X[:rows], seed)
        for optimizer in optimizers:
            optimizer.step()
        # The compilation for eight rows alone is replaced by one for any number of rows.
        assert all("any size" in what for what in dispatch_report(module).under_way) or not seed
        if rows in (4, 3):  # the code covers the sizes until then, and is compiled again for more
            tvmbridge.wait(module)
    report = dispatch_report(module)
    assert (report.tvm_calls, set(report.fallbacks)) == (4, {COMPILING})
    assert {s.cache for s in report.specializations} == {"hit"}


def test_the_parent_measures_for_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    measured = table.Table.choice

    def choice(self: Any, question: str, among: Any, measure: Any) -> str:
        def counted() -> str:
            asked.append(question)
            return str(measure())

        return measured(self, question, among, counted)

    monkeypatch.setattr(table.Table, "choice", choice)
    module, x = nn.Linear(256, 256).eval(), torch.randn(64, 256)
    with torch.no_grad():
        add_tvm_dispatch(module, x, options=BACKGROUND)
        tvmbridge.wait(module)
        assert asked
        assert all(f"{torch.get_num_threads()} threads" in q for q in asked)
        count = len(asked)
        expected = x @ module.weight.t() + module.bias
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)
    assert dispatch_report(module).specializations[0].cache == "hit"
    assert len(asked) == count


def test_where_nothing_can_be_forked_the_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "0")
    eager, module = _pair()
    add_tvm_dispatch(module, X, options=BACKGROUND)
    _assert_same(module, eager, X, 0)
    assert dispatch_report(module).fallbacks == {}
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(str(children.cannot_fork())))
    thread.start()
    thread.join()
    assert found == ["the call is not made by the main thread"]


def test_one_child_at_a_time(held: None) -> None:
    modules = [nn.Linear(6, 6) for _ in range(2)]
    for module in modules:
        add_tvm_dispatch(module, X, options=BACKGROUND)
        module(X)
    assert [len(dispatch_report(m).under_way) for m in modules] == [1, 0]
    tvmbridge.remove_tvm_dispatch(modules[0])
    modules[1](X)
    assert len(dispatch_report(modules[1]).under_way) == 1
    tvmbridge.remove_tvm_dispatch(modules[1])


def test_a_module_that_is_gone_ends_its_child(held: None) -> None:
    module = nn.Linear(6, 6)
    add_tvm_dispatch(module, X, options=BACKGROUND)
    (job,) = module.forward.code.background._jobs.values()
    pid = job.child.pid
    del module, job
    __import__("gc").collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, time, torch
            from tvmbridge import add_tvm_dispatch
            from tvmbridge.runtime.entry_compiler import Compiler
            mine = os.getpid()
            Compiler._logged = lambda *_: time.sleep(600)
            module = torch.nn.Linear(6, 6)
            add_tvm_dispatch(module, torch.randn(8, 6), budget=0)
            (job,) = module.forward.code.background._jobs.values()
            print(job.child.pid, flush=True)
            time.sleep(600)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    until = time.monotonic() + 60.0
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

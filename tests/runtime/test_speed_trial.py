"""Compiled calls and the module's own forward are timed, and the faster of the two serves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dispatch_helpers import assert_same_step, eager, make_block, sample, train_step
from tests.runtime.timed_calls import CLOCK, SECONDS, slow_own, timed_by_sleeping
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.backends import backend_of
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.kernels.table import clear_tables
from tvmbridge.runtime import module_code, speed_trial
from tvmbridge.runtime.module_code import ModuleCode
from tvmbridge.runtime.speed_trial import SpeedTrial
from tvmbridge.runtime.timed_path import AsidePath, TimedPath

# A trial: two compiled calls and one own forward to warm up, then five timed calls of each.
TRIAL = 13
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures(timed_by_sleeping.__name__)


def slow_code(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Make a function of compiled code sleep, so that it is slower than any module here."""
    genuine = LoadedModule.call

    def call(loaded: LoadedModule, name: str, values: Sequence[Any]) -> list[torch.Tensor]:
        if name == function:
            CLOCK.sleep(SECONDS)
        return genuine(loaded, name, values)

    monkeypatch.setattr(LoadedModule, "call", call)


def path_of(module: nn.Module) -> Any:
    return module.forward.code.paths.known[0][0]  # type: ignore[union-attr, index]


def evaluated(module: nn.Module, x: torch.Tensor, calls: int) -> None:
    reference = eager(module)
    with torch.no_grad():
        for _ in range(calls):
            torch.testing.assert_close(module(x), reference(x))


def test_long_calls_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_code(monkeypatch, "forward")
    backend = replace(backend_of(CPU), long_call=SECONDS / 2)
    monkeypatch.setattr(speed_trial, "backend_of", lambda _: backend)
    module = add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())
    evaluated(module, sample(), 5)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.timed_calls, report.aside_calls) == (5, 0, 0)
    assert "too long to have calls" in " ".join(str(report).split())


def test_a_trial_of_calls_of_milliseconds_ends_after_one_sample_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_code(monkeypatch, "forward")
    genuine = ModuleCode.run_own

    def run_own(code: ModuleCode, arguments: Any) -> Any:
        CLOCK.sleep(1.2 * SECONDS)
        return genuine(code, arguments)

    monkeypatch.setattr(ModuleCode, "run_own", run_own)
    module = add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())
    evaluated(module, sample(), 8)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.timed_calls, report.aside_calls) == (6, 2, 0)
    (found,) = report.specializations
    assert found.verdict is not None
    assert found.verdict.pays


def test_slower_code_steps_aside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_code(monkeypatch, "forward")
    module = add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())
    evaluated(module, sample(), TRIAL + 5)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.timed_calls, report.aside_calls) == (7, 6, 5)
    assert not report.fallbacks
    assert report.share == 1
    (found,) = report.specializations
    assert found.verdict is not None
    assert found.verdict.own is not None
    assert found.verdict.compiled > SECONDS > found.verdict.own
    assert isinstance(path_of(module), AsidePath)
    text = " ".join(str(report).split())
    assert "which is faster: 5" in text
    assert "so the module's own forward serves" in text
    (logged,) = [r.getMessage() for r in caplog.records if r.name.startswith("tvmbridge.runtime")]
    assert re.search("a call takes .* ms by compiled code .* only_if_faster=False", logged)
    # After the trial the own forward serves, so a replaced layer needs no new code.
    module.inner = nn.Linear(24, 24, dtype=torch.float64)
    evaluated(module, sample(), 3)
    assert dispatch_report(module).aside_calls == 8


def test_faster_code_serves_by_the_same_path_as_without_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_own(monkeypatch)
    checked_in_full = []
    serve = ModuleCode.serve
    monkeypatch.setattr(
        ModuleCode, "serve", lambda *args: checked_in_full.append(1) or serve(*args)
    )
    module = add_tvm_dispatch(nn.Tanh(), torch.ones(3))
    timed = []
    for _ in range(12):
        module(torch.ones(3))
        if isinstance(path := path_of(module), TimedPath):
            timed.append(path.path)
    # It keeps what was prepared during the trial, such as CUDA graphs.
    assert path_of(module) is timed[-1]
    assert len(checked_in_full) == 1
    report = dispatch_report(module)
    # If the difference is clear, the trial ends early.
    assert (report.tvm_calls, report.timed_calls, report.aside_calls) == (8, 4, 0)
    assert not isinstance(path_of(module), AsidePath | TimedPath)
    assert "so compiled code serves" in " ".join(str(report).split())


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_training_is_timed_with_its_backward(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    slow_code(monkeypatch, function)
    module = add_tvm_dispatch(make_block().train(), sample().requires_grad_())
    reference = eager(module)
    for _ in range(TRIAL + 3):
        assert_same_step(module, reference, sample())
    report = dispatch_report(module)
    assert (report.timed_calls, report.aside_calls) == (6, 3)
    (verdict,) = (s.verdict for s in report.specializations)
    assert verdict is not None
    assert verdict.compiled > SECONDS


@pytest.mark.parametrize("calls", [2, 3, 20])
def test_a_backward_of_several_calls_has_calls_of_one_kind(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Calls of both kinds in one backward pass would each get the time of the other kind."""
    slow_code(monkeypatch, "backward")
    module = add_tvm_dispatch(nn.Tanh().train(), torch.ones(3, requires_grad=True))
    for _ in range(TRIAL + 3):
        xs = [torch.ones(3, requires_grad=True) for _ in range(calls)]
        torch.stack([module(x) for x in xs]).sum().backward()
        torch.testing.assert_close(xs[0].grad, xs[-1].grad)
    report = dispatch_report(module)
    (verdict,) = (s.verdict for s in report.specializations)
    assert verdict is not None
    assert verdict.own is not None
    assert verdict.compiled > SECONDS
    assert verdict.own < SECONDS / 100
    assert report.aside_calls >= 2 * calls


def test_each_mode_has_its_own_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_code(monkeypatch, "backward")
    module, x = add_tvm_dispatch(nn.Tanh()), torch.ones(3)

    def train(calls: int) -> None:
        for _ in range(calls):
            module(x.clone().requires_grad_()).sum().backward()

    train(TRIAL + 1)
    assert dispatch_report(module).aside_calls == 1
    genuine = ModuleCode.run_own
    slow_own(monkeypatch)
    evaluated(module.eval(), x, TRIAL + 1)
    monkeypatch.setattr(ModuleCode, "run_own", genuine)
    module.train()
    train(2)
    training, evaluation = (s.verdict for s in dispatch_report(module).specializations)
    assert training is not None
    assert evaluation is not None
    assert (training.pays, evaluation.pays) == (False, True)
    assert dispatch_report(module).aside_calls == 3


def test_calls_in_training_without_any_backward_are_timed_later() -> None:
    trial = SpeedTrial(None, CPU, lambda _: None, trains=True)
    x = torch.ones(3, requires_grad=True)
    for _ in range(speed_trial._MOST_CALLS + 2 * TRIAL):
        trial.serve(x.sin, x.sin)
    assert trial.verdict is not None
    assert trial.timed_calls <= speed_trial._MOST_SAMPLES + 1


def test_an_uncertain_verdict_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a noisy machine the medians of a trial say one thing, and the minima the other."""
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path))
    calls = iter(range(1000))

    def code() -> None:
        CLOCK.sleep(2e-4 if next(calls) % 5 else 1e-6)

    for times, kept in ((1, False), (3, True)):
        trial = SpeedTrial("a question", CPU, lambda _: None)
        while trial.verdict is None:
            trial.serve(code, lambda seconds=times * 1e-4: CLOCK.sleep(seconds))
        assert (SpeedTrial("a question", CPU, lambda _: None).verdict is not None) is kept


@pytest.mark.parametrize("interruptions", [6, 1000])
def test_calls_in_which_another_process_ran_do_not_decide(
    monkeypatch: pytest.MonkeyPatch, interruptions: int
) -> None:
    """Another process takes 15 ms of each of the first own calls; they would lose each trial."""
    switches = 0
    left = iter(range(interruptions))
    monkeypatch.setattr(speed_trial, "_switches", lambda: switches)

    def own() -> None:
        nonlocal switches
        CLOCK.sleep(1e-4)
        if next(left, None) is not None:
            switches += 1
            CLOCK.sleep(15e-3)

    trial = SpeedTrial(None, CPU, lambda _: None)
    calls = 0
    while trial.verdict is None:
        trial.serve(lambda: CLOCK.sleep(2e-4), own)
        calls += 1
    assert calls < TRIAL + 20
    # If every own call is interrupted, the machine is like that.
    assert trial.verdict.pays == (interruptions == 1000)


def test_code_for_any_size_is_timed_for_sizes_that_come_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_code(monkeypatch, "forward")
    plain = nn.Sequential(nn.Linear(24, 8), nn.Tanh()).double().eval().requires_grad_(False)
    module = add_tvm_dispatch(copy.deepcopy(plain), sample(6, 24), dynamic_shapes="auto")
    for rows in range(2, 6):
        evaluated(module, sample(rows, 24), 2)
    assert dispatch_report(module).timed_calls == 0
    evaluated(module, sample(7, 24), module_code._RESTS + TRIAL + 3)
    report = dispatch_report(module)
    assert (report.timed_calls, report.aside_calls) == (6, 3)


def test_random_draws_and_buffers_are_those_of_one_call() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.4)).double().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), sample())
    for seed in range(TRIAL + 2):
        steps = [train_step(m, sample(), seed) for m in (module, plain)]
        torch.testing.assert_close(*steps)
        torch.testing.assert_close(module.state_dict(), plain.state_dict())
    assert dispatch_report(module).timed_calls >= 4


def test_a_checkpoint_is_served_alike_at_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_code(monkeypatch, "forward")
    module = add_tvm_dispatch(make_block(dropout=0.0).train(), sample().requires_grad_())
    reference = eager(module)

    def step(called: nn.Module, around: Callable[..., Any]) -> torch.Tensor:
        x = sample().requires_grad_()
        around(called, x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    for number in range(TRIAL + 8):
        around = (
            (lambda m, x: checkpoint(m, x, use_reentrant=False))
            if number % 3
            else (lambda m, x: m(x))
        )
        torch.testing.assert_close(step(module, around), step(reference, around))


def test_a_call_that_raises_is_not_timed() -> None:
    trial = SpeedTrial(None, CPU, lambda _: None)

    def refuse() -> None:
        raise KeyError

    for _ in range(TRIAL):
        with pytest.raises(KeyError):
            trial.serve(refuse, refuse)
    assert (trial.verdict, trial.timed_calls) == (None, 0)


@pytest.mark.parametrize(
    "how", ["option", "variable", "check", "raise", "deterministic"], ids=lambda how: str(how)
)
def test_what_asks_for_served_calls_has_no_trial(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    slow_code(monkeypatch, "forward")
    options: dict[str, Any] = {}
    if how == "option":
        monkeypatch.delenv("TVMBRIDGE_ONLY_IF_FASTER")
        options["only_if_faster"] = False
    if how == "variable":
        monkeypatch.setenv("TVMBRIDGE_ONLY_IF_FASTER", "0")
    if how == "check":
        options["check"] = "first"
    torch.use_deterministic_algorithms(how == "deterministic")
    try:
        on_fallback: Any = "raise" if how == "raise" else "warn"
        module = add_tvm_dispatch(
            nn.Tanh(), torch.ones(3), options=options, on_fallback=on_fallback
        )
        evaluated(module, torch.ones(3), 6)
        report = dispatch_report(module)
        assert (report.tvm_calls, report.timed_calls) == (6, 0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_verdict_is_kept_on_this_machine_and_a_damaged_one_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path))
    slow_code(monkeypatch, "forward")

    def served_of(calls: int) -> tuple[int, int, int]:
        module = add_tvm_dispatch(nn.Tanh(), torch.ones(3))
        evaluated(module, torch.ones(3), calls)
        report = dispatch_report(module)
        return report.tvm_calls, report.timed_calls, report.aside_calls

    assert served_of(TRIAL + 1) == (7, 6, 1)
    assert served_of(4) == (0, 0, 4)
    (file,) = tmp_path.glob("choices-*.json")
    kept = file.read_text()
    damaged = re.sub(r'("seconds of Tanh[^:]*": )"[^"]*"', r'\1"soon -1"', kept)
    assert damaged != kept
    clear_tables(tmp_path)
    file.write_text(damaged)
    file.chmod(0o600)
    assert served_of(TRIAL + 1) == (7, 6, 1)


def test_torch_compile_times_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_code(monkeypatch, "forward")
    reference = nn.Tanh()
    compiled = torch.compile(copy.deepcopy(reference), backend="tvmbridge")
    calls: list[float] = []
    with torch.no_grad():
        for _ in range(TRIAL + 8):
            started = CLOCK.now
            torch.testing.assert_close(compiled(sample()), reference(sample()))
            calls.append(CLOCK.now - started)
    assert min(calls[-6:]) < SECONDS
    torch._dynamo.reset()

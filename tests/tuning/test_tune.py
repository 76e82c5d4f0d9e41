"""Tuning with few trials: records are found, kept and used; an interrupted run resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.records.planted import SHAPE, Softmax, record_of, sample, softmax_task, wrong
from tvmbridge import add_tvm_dispatch, dispatch_report, tune
from tvmbridge.core.errors import BridgeError
from tvmbridge.records import Folder
from tvmbridge.records.folder import RECORDS
from tvmbridge.records.pending import read_pending
from tvmbridge.schedules.target import host_target
from tvmbridge.tuning import tune_pending
from tvmbridge.tuning.worker import Worker, WorkerError

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.records.planted import Softmax, sample
from tvmbridge import tune
print(tune(Softmax().eval(), sample(), log_dir={log_dir!r}, trials={trials}))
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("TVMBRIDGE_TUNING_LOGS", raising=False)


@pytest.mark.slow
def test_pending_tasks_are_tuned_and_then_used(tmp_path: Path) -> None:
    module, x = Softmax().eval(), sample()
    expected = module(x)
    add_tvm_dispatch(module, x, options={"tuning_logs": str(tmp_path)})
    folder = Folder.below(tmp_path, host_target())
    # Plant a wrong record that claims to be the fastest.
    index, _ = folder.add_task(softmax_task())
    folder.add_records(index, [record_of(softmax_task(), wrong, 1e-9)])
    report = tune_pending(tmp_path, trials=7)
    (outcome,) = report.outcomes
    assert outcome.verdict is not None
    assert outcome.verdict.trials == 7
    assert outcome.verdict.rule_seconds is not None
    assert read_pending(folder) == []
    (entry,) = folder.load().values()
    planted = entry.records[0]
    assert planted.seconds == 1e-9
    assert outcome.verdict.schedule != planted.digest
    assert len(entry.records) == 7
    again = add_tvm_dispatch(Softmax().eval(), x, options={"tuning_logs": str(tmp_path)})
    with torch.no_grad():
        torch.testing.assert_close(again(x), expected)
    assert dispatch_report(again).specializations[0].kernels.tuned == report.tuned
    assert read_pending(folder) == []
    # All trials are done, so nothing is measured again and no process is started.
    second = tune(again, x, log_dir=tmp_path, trials=7)
    assert [o.known for o in second.outcomes] == [True]
    assert second.outcomes[0].verdict == outcome.verdict


def test_a_run_without_time_leaves_all_as_it_was(tmp_path: Path) -> None:
    report = tune(Softmax().eval(), sample(), log_dir=tmp_path, timeout=1e-9)
    assert report.unfinished == 1
    assert "out of time" in str(report)
    assert Folder.below(tmp_path, host_target()).load() == {}


@pytest.mark.parametrize("limits", [{"trials": 0}, {"timeout": 0}, {"timeout": float("nan")}])
def test_limits_are_validated(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        tune(Softmax().eval(), sample(), **limits)  # type: ignore[arg-type]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BridgeError, match="name another log_dir"):
        tune(Softmax().eval(), sample(), log_dir=tmp_path / "file", trials=1)


@pytest.mark.slow
def test_a_worker_survives_crashes_and_hangs() -> None:
    worker = Worker()
    try:
        assert worker.call(abs, -3, timeout=60) == 3
        with pytest.raises(WorkerError, match="crashed"):
            worker.call(os.abort, timeout=60)
        with pytest.raises(WorkerError, match="no answer") as caught:
            worker.call(time.sleep, 60, timeout=0.5)
        assert caught.value.late
        with pytest.raises(WorkerError, match="invalid literal"):
            worker.call(int, "x", timeout=60)
        assert worker.call(abs, -4, timeout=60) == 4
        assert worker.starts == 3
    finally:
        worker.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_keeps_its_batches_and_goes_on(tmp_path: Path) -> None:
    """Kill a script without a ``__main__`` guard by SIGKILL after the first batch of trials."""
    folder = Folder.below(tmp_path / "logs", host_target())
    command = [sys.executable, "-c"]
    text = SCRIPT.format(root=str(ROOT), log_dir=str(tmp_path / "logs"), trials=64)
    process = subprocess.Popen([*command, text], start_new_session=True)
    try:
        while not (folder.path / RECORDS).exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(1.0)
    left = subprocess.run(["ps", "-o", "stat=", "-g", str(process.pid)], capture_output=True)
    # The workers ended with it; they may be zombies that nobody has waited for yet.
    assert [state for state in left.stdout.split() if not state.startswith(b"Z")] == []
    (entry,) = folder.load().values()
    measured = len(entry.records)
    assert 0 < measured < 64
    text = SCRIPT.format(root=str(ROOT), log_dir=str(tmp_path / "logs"), trials=measured + 8)
    subprocess.run([*command, text], check=True)
    (entry,) = folder.load().values()
    assert entry.verdict is not None
    assert measured < len(entry.records) <= measured + 8
    assert entry.verdict.trials == len(entry.records)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_is_tuned_and_equal_to_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.LayerNorm(48), torch.nn.GELU())
    x = torch.randn(SHAPE, requires_grad=True)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in (x, *module.parameters())]
    report = tune(module.train(), x, log_dir=tmp_path, trials=4)
    assert len(report.outcomes) > 1
    x.grad = None
    module.zero_grad()
    add_tvm_dispatch(module, x, options={"tuning_logs": str(tmp_path)})
    module(x).square().sum().backward()
    kernels = dispatch_report(module).specializations[0].kernels
    assert kernels.tuned >= report.tuned
    for p, gradient in zip((x, *module.parameters()), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-5)

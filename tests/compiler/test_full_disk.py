"""A full disk, or a folder without access: compilation goes on with a warning."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tests.records.planted import record_of, right, softmax_task
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report
from tvmbridge.cli import main
from tvmbridge.records import Folder
from tvmbridge.records.folder import RECORDS
from tvmbridge.schedules import threads
from tvmbridge.schedules.target import host_target

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def _x() -> torch.Tensor:
    return torch.linspace(-1, 2, 18).reshape(3, 6)


def assert_served(module: nn.Module, **options: object) -> None:
    add_tvm_dispatch(module.eval(), _x(), options=options or None)
    with torch.no_grad():
        torch.testing.assert_close(module(_x()), eager(module)(_x()))
    assert dispatch_report(module).tvm_calls == 1


def test_what_cannot_be_dumped_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "002_LowerDropout.py").symlink_to(FULL)
    monkeypatch.setenv("TVMBRIDGE_DUMP", str(tmp_path))
    assert_served(nn.Softmax(-1))
    assert "No space left on device" in caplog.text
    assert (tmp_path / "003_LowerBatchNorm.py").exists()
    monkeypatch.setenv("TVMBRIDGE_DUMP", str(FULL / "below a file"))
    assert_served(nn.Softmax(-1))
    assert "Not a directory" in caplog.text


def test_a_directory_of_records_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    monkeypatch.setenv("TVMBRIDGE_TUNING_LOGS", str(circle))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert_served(nn.Softmax(-1))
    # Simulate a folder of another user: the tests may run as root, who can read any folder.
    forbidden = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(Folder, "exists", property(lambda _: _raise(forbidden)))
    assert_served(nn.Softmax(-1))
    for message in ("circle", "Permission denied"):
        assert message in caplog.text


def _raise(error: OSError) -> Any:
    raise error


def test_tuning_keeps_what_it_has_and_says_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.below(tmp_path, host_target())
    folder.open_for_writing()
    task = softmax_task()
    index, _ = folder.add_task(task)
    # Records are never written through a link, so os.open must return the full device instead.
    genuine = os.open
    with monkeypatch.context() as patches:
        patches.setattr(os, "open", lambda path, *rest: genuine(_full(Path(path)), *rest))
        with pytest.raises(BridgeError, match="No space left on device"):
            folder.add_records(index, [record_of(task, right, 1e-6)])
    assert list(folder.load()) == [task]


def _full(path: Path) -> Path:
    return FULL if path.name == RECORDS else path


def test_without_room_for_a_temporary_file_loops_run_on_other_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    assert threads.share_torch_threads.__wrapped__() is False
    assert "no temporary file" in caplog.text


def test_a_command_without_room_for_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "graph.dot"
    out.symlink_to(FULL)
    assert main(["visualize", "tests.compiler.test_full_disk:softmax", "--out", str(out)]) == 1
    assert "No space left on device" in capsys.readouterr().err


def softmax() -> tuple[nn.Module, torch.Tensor]:
    return nn.Softmax(-1).eval(), _x()

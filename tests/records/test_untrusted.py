"""Files that other users can write, huge files, and special files are not read, with a warning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.records.planted import plant, softmax_task
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.own_files import UntrustedFileError
from tvmbridge.records import Library, Task, jsonlines
from tvmbridge.records.folder import RECORDS, VERDICTS, WORKLOADS
from tvmbridge.records.jsonlines import read_lines
from tvmbridge.records.meta import NAME as META
from tvmbridge.records.pending import NAME as PENDING
from tvmbridge.records.pending import note_pending, read_pending
from tvmbridge.schedules.target import host_target
from tvmbridge.tuning.merge import prune


@pytest.fixture(scope="module")
def task() -> Task:
    return softmax_task()


def test_an_enormous_file_is_not_read(
    tmp_path: Path, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant(tmp_path, task)
    os.truncate(folder.path / RECORDS, 2**40)
    assert Library.open(str(tmp_path), host_target()).schedule(task) is None
    assert "larger than" in caplog.text
    assert str(folder.path / RECORDS) in caplog.text


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UntrustedFileError, match="no regular file"):
        read_lines(tmp_path / "pipe")


@pytest.mark.parametrize("name", [META, WORKLOADS, RECORDS, VERDICTS])
def test_what_others_can_write_is_not_read(
    tmp_path: Path, task: Task, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant(tmp_path, task)
    (folder.path / name).chmod(0o664)
    assert Library.open(str(tmp_path), host_target()).schedule(task) is None
    assert "chmod go-w" in caplog.text
    assert str(folder.path) in caplog.text
    content = (folder.path / name).read_bytes()
    with pytest.raises(BridgeError, match="chmod go-w"):
        prune(tmp_path)
    assert (folder.path / name).read_bytes() == content
    (folder.path / name).chmod(0o644)
    assert Library.open(str(tmp_path), host_target()).schedule(task) is not None


def test_files_of_another_user_are_not_read(
    tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant(tmp_path, task)
    note_pending(folder, {task: 1}, "here")
    owner = 4321
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        status = list(real(descriptor))
        status[4] = owner
        return os.stat_result(status)

    monkeypatch.setattr(jsonlines.os, "fstat", fstat)
    assert Library.open(str(tmp_path), host_target()).schedule(task) is None
    assert "another user (4321)" in caplog.text
    with pytest.raises(BridgeError, match="another user"):
        read_pending(folder)
    owner = 0  # pretend that root wrote the file
    assert len(read_pending(folder)) == 1


def test_own_files_are_not_writable_by_others_whatever_the_umask(
    tmp_path: Path, task: Task
) -> None:
    before = os.umask(0)
    try:
        folder = plant(tmp_path, task)
    finally:
        os.umask(before)
    assert Library.open(str(tmp_path), host_target()).schedule(task) is not None
    assert all(p.stat().st_mode & 0o022 == 0 for p in folder.path.glob("*.json"))


def test_nothing_is_written_through_a_link(tmp_path: Path, task: Task) -> None:
    folder = plant(tmp_path, task)
    (tmp_path / "precious").write_text("mine\n")
    (folder.path / PENDING).symlink_to(tmp_path / "precious")
    note_pending(folder, {task: 1}, "here")
    assert (tmp_path / "precious").read_text() == "mine\n"

"""The list of tuning tasks that have no record yet."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.records.planted import Softmax, plant, sample, softmax_task
from tvmbridge import CompileOptions, add_tvm_dispatch
from tvmbridge.records import Folder, pending
from tvmbridge.records.pending import NAME, note_pending, read_pending, remove_pending
from tvmbridge.schedules.target import host_target


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("TVMBRIDGE_TUNING_LOGS", raising=False)


def folder_in(log_dir: Path) -> Folder:
    return Folder.below(log_dir, host_target())


def test_compilation_notes_what_has_no_record_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tvmbridge"):
        for _ in range(2):
            options = CompileOptions(tuning_logs=str(tmp_path))
            add_tvm_dispatch(Softmax().eval(), sample(), options=options)
    (noted,) = read_pending(folder_in(tmp_path))
    assert noted.task == softmax_task()
    assert (noted.weight, noted.origin) == (1, "Softmax")
    assert "1 kernels without a tuning record are pending" in caplog.text
    remove_pending(folder_in(tmp_path), [noted.task])
    assert read_pending(folder_in(tmp_path)) == []


def test_what_was_tuned_is_not_noted(tmp_path: Path) -> None:
    plant(tmp_path, softmax_task(), seconds=3e-6)  # the schedule by rules was faster
    add_tvm_dispatch(Softmax().eval(), sample(), options={"tuning_logs": str(tmp_path)})
    assert read_pending(folder_in(tmp_path)) == []


def test_only_who_asks_gets_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_tvm_dispatch(Softmax().eval(), sample())
    assert list((tmp_path / "cwd").iterdir()) == []
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("TVMBRIDGE_TUNING_LOGS", str(tmp_path / "logs"))
    add_tvm_dispatch(Softmax().eval(), sample())
    assert len(read_pending(folder_in(tmp_path / "logs"))) == 1


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_mistyped_directory_is_named_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    mistyped = tmp_path / by / "no" / "such"
    if by == "variable":
        monkeypatch.setenv("TVMBRIDGE_TUNING_LOGS", str(mistyped))
    options = {"tuning_logs": str(mistyped)} if by == "option" else {}
    for _ in range(2):
        module = add_tvm_dispatch(Softmax().eval(), sample(), options=options)
    assert module(sample()).shape == sample().shape
    assert not (tmp_path / by).exists()
    assert caplog.text.count(f"there is no directory {mistyped}") == 1


def test_a_list_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    module = add_tvm_dispatch(
        Softmax().eval(), sample(), options={"tuning_logs": str(tmp_path / "file")}
    )
    assert module(sample()).shape == sample().shape
    assert "could not be noted" in caplog.text


def test_the_list_is_bounded_and_survives_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_in(tmp_path)
    task = softmax_task()
    assert note_pending(folder, {task: 2}, "here") == 1
    with (folder.path / NAME).open("a") as file:
        file.write('{"task": 3}\n{"task": ["1", "AAAA"], "weight": 1, "origin": ""}\n{"ta')
    assert [p.weight for p in read_pending(folder)] == [2]
    remove_pending(folder, [])
    monkeypatch.setattr(pending, "MOST_TASKS", 0)
    (folder.path / NAME).unlink()
    assert note_pending(folder, {task: 2}, "here") == 0
    assert "is full" in caplog.text


@pytest.mark.parametrize("value", [3, b"bytes", False])
def test_the_option_is_validated(value: object) -> None:
    with pytest.raises(TypeError, match="tuning_records=False"):
        CompileOptions(tuning_logs=value)  # type: ignore[arg-type]

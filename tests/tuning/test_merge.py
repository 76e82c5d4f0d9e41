"""Merging and compacting folders of records."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.records.planted import other_processor, plant, record_of, right, softmax_task, wrong
from tvmbridge import cli
from tvmbridge.core.errors import BridgeError
from tvmbridge.records import Task
from tvmbridge.records.folder import RECORDS, Folder
from tvmbridge.records.meta import Meta, read_meta, write_meta
from tvmbridge.schedules.target import host_target
from tvmbridge.tuning.merge import merge, prune


@pytest.fixture(scope="module")
def task() -> Task:
    return softmax_task()


def lines(folder: Path) -> int:
    return len((folder / RECORDS).read_text().splitlines())


def test_the_better_record_stays(tmp_path: Path, task: Task) -> None:
    good = plant(tmp_path / "a", task, right, seconds=1e-6)
    plant(tmp_path / "b", task, wrong, seconds=1.5e-6)
    out = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "c")
    assert out == Folder.below(tmp_path / "c", host_target()).path
    (entry,) = Folder(out, host_target()).load().values()
    assert entry.chosen == good.load()[task].chosen
    assert entry.verdict is not None
    assert entry.verdict.seconds == 1e-6
    assert lines(out) == 1
    assert merge([out, good.path]) == out
    assert lines(out) == 1


def test_a_verdict_without_a_record_loses_against_one_with_it(tmp_path: Path, task: Task) -> None:
    slower = plant(tmp_path / "a", task, seconds=3e-6)
    better = plant(tmp_path / "b", task)
    merge([slower.path, better.path])
    assert slower.load()[task].chosen is not None


def test_prune_keeps_the_applied_record_and_unfinished_work(tmp_path: Path, task: Task) -> None:
    folder = plant(tmp_path, task)
    folder.add_records(0, [record_of(task, wrong, 5e-6), record_of(task, right, 6e-6)])
    other = Task.of(apply_right(task))
    index, _ = folder.add_task(other)
    folder.add_records(index, [record_of(other, lambda _: None, 1e-6)])
    prune(tmp_path)
    entries = folder.load()
    assert len(entries[task].records) == 1
    assert entries[task].chosen is not None
    assert len(entries[other].records) == 1


def apply_right(task: Task) -> object:
    import tvm

    schedule = tvm.s_tir.Schedule(task.mod)
    right(schedule)
    return schedule.mod["main"]


@pytest.mark.parametrize("what", ["target", "tvm"])
def test_folders_that_differ_are_refused_by_name(tmp_path: Path, task: Task, what: str) -> None:
    first, second = plant(tmp_path / "a", task), plant(tmp_path / "b", task)
    meta = read_meta(second.path)
    assert isinstance(meta, Meta)
    processor = other_processor()
    value = {**meta.target, "mcpu": processor} if what == "target" else "0.26.0"
    write_meta(second.path, dataclasses.replace(meta, **{what: value}))
    with pytest.raises(BridgeError, match=rf"{processor}|0\.26\.0") as caught:
        merge([first.path, second.path], tmp_path / "c")
    assert str(second.path) in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_what_is_no_folder_of_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="none"):
        merge([tmp_path])


def test_the_command_merges(tmp_path: Path, task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = plant(tmp_path / "a", task), plant(tmp_path / "b", task)
    out = tmp_path / "c"
    assert cli.main(["tune", "--merge", str(a.path), str(b.path), "--out", str(out)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert cli.main(["tune", "--prune", str(out)]) == 0


@pytest.mark.parametrize(
    "words",
    [[], ["--pending", "--prune", "x"], ["m:f", "--pending"], ["--pending", "--out", "x"]],
)
def test_arguments_that_do_not_fit_exit_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", *words])
    assert caught.value.code == 2

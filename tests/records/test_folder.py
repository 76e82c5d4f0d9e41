"""Folders of records: records that are applied or refused, and the effect of damage."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
import tvm
from tvm.s_tir import meta_schedule as ms

from tests.records.planted import (
    Softmax,
    other_processor,
    plant,
    record_of,
    right,
    sample,
    softmax_task,
    wrong,
)
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import BridgeError
from tvmbridge.records import Coverage, Folder, Library, Task
from tvmbridge.records.folder import RECORDS, VERDICTS, WORKLOADS, Verdict
from tvmbridge.records.meta import Meta, read_meta, target_name, write_meta
from tvmbridge.schedules.target import host_target


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all directories of records except the test's own."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("TVMBRIDGE_TUNING_LOGS", raising=False)


@pytest.fixture(scope="module")
def task() -> Task:
    return softmax_task()


def coverage(log_dir: Path, **options: object) -> Coverage:
    """Compile, compare with eager, and return where the kernels come from."""
    module, x = Softmax().eval(), sample()
    expected = module(x)
    add_tvm_dispatch(module, x, options={"tuning_logs": str(log_dir), **options})
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)
    report = dispatch_report(module)
    assert report.fallbacks == {}
    assert str(report.specializations[0].kernels) in str(report)
    return report.specializations[0].kernels


def finds(log_dir: Path, task: Task) -> bool:
    return Library.open(str(log_dir), host_target()).schedule(task) is not None


def test_a_record_is_applied_and_reported(tmp_path: Path, task: Task) -> None:
    plant(tmp_path, task)
    assert coverage(tmp_path) == Coverage(tuned=1)
    assert coverage(tmp_path, tuning_records=False) == Coverage(by_rule=1)


def test_without_a_record_the_report_says_how_to_make_them(tmp_path: Path, task: Task) -> None:
    module = add_tvm_dispatch(Softmax().eval(), sample(), options={"tuning_logs": str(tmp_path)})
    report = dispatch_report(module)
    assert report.specializations[0].kernels == Coverage(by_rule=1, untuned=1)
    name = target_name(host_target())
    assert f"kernels that nobody has tuned for {name}: 1; `python -m tvmbridge tune" in str(report)
    plant(tmp_path, task)
    module = add_tvm_dispatch(Softmax().eval(), sample(), options={"tuning_logs": str(tmp_path)})
    assert "nobody has tuned" not in str(dispatch_report(module))


def test_the_working_directory_is_read_only_where_it_is_named(
    tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "cwd" / "tuning_logs", task)
    module = add_tvm_dispatch(Softmax().eval(), sample())
    assert dispatch_report(module).specializations[0].kernels.tuned == 0
    monkeypatch.setenv("TVMBRIDGE_TUNING_LOGS", "tuning_logs")
    module = add_tvm_dispatch(Softmax().eval(), sample())
    assert dispatch_report(module).specializations[0].kernels.tuned == 1


def test_records_are_read_once_until_they_change(tmp_path: Path, task: Task) -> None:
    plant(tmp_path, task)
    first, second = (Library.open(str(tmp_path), host_target()).entries[0] for _ in range(2))
    assert first is second
    plant(tmp_path, task, seconds=1e-7)
    assert Library.open(str(tmp_path), host_target()).entries[0] is not first


def test_a_slower_record_is_not_applied(tmp_path: Path, task: Task) -> None:
    plant(tmp_path, task, seconds=2e-6, rule=2e-6)
    assert coverage(tmp_path) == Coverage(by_rule=1)


def test_a_record_that_no_verdict_names_is_not_applied(tmp_path: Path, task: Task) -> None:
    folder = plant(tmp_path, task)
    (folder.path / VERDICTS).unlink()
    assert coverage(tmp_path) == Coverage(by_rule=1, untuned=1)
    # Add a faster record that is wrong and was never checked.
    folder.add_verdict(Verdict(folder.add_task(task)[1], 1, 2e-6, "0123456789abcdef", 1e-6))
    folder.add_records(0, [record_of(task, wrong, 1e-9)])
    assert coverage(tmp_path) == Coverage(by_rule=1)


@pytest.mark.parametrize("what", ["target", "tvm", "missing", "damaged"])
def test_records_of_another_target_or_tvm_are_refused_with_the_reason(
    tmp_path: Path, task: Task, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant(tmp_path, task)
    meta = read_meta(folder.path)
    assert isinstance(meta, Meta)
    if what == "target":
        other = {**meta.target, "mcpu": other_processor()}
        write_meta(folder.path, dataclasses.replace(meta, target=other))
    elif what == "tvm":
        write_meta(folder.path, dataclasses.replace(meta, tvm="0.26.0"))
    elif what == "missing":
        (folder.path / "META.json").unlink()
    else:
        (folder.path / "META.json").write_text("{")
    with caplog.at_level(logging.WARNING, "tvmbridge.records"):
        assert coverage(tmp_path) == Coverage(by_rule=1, untuned=1)
    reasons = {"target": other_processor(), "tvm": "TVM 0.26.0"}
    reasons |= {"missing": "no META", "damaged": "cannot be"}
    assert reasons[what] in caplog.text
    with pytest.raises(BridgeError, match="another log_dir"):
        folder.open_for_writing()


def test_a_record_of_another_target_among_the_lines_is_skipped(
    tmp_path: Path, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant(tmp_path, task)
    line = json.loads((folder.path / RECORDS).read_text())
    line[1][2]["mcpu"] = other_processor()
    (folder.path / RECORDS).write_text(json.dumps(line) + "\n")
    assert coverage(tmp_path) == Coverage(by_rule=1)
    assert "no records for this target" in caplog.text


@pytest.mark.parametrize("name", [WORKLOADS, RECORDS, VERDICTS])
@pytest.mark.parametrize(
    "damage", [b"", b"\n", b"{not json\n", b'[1, "\xff\n', b"[0, [1]]\n", b"3\n"]
)
def test_damaged_lines_are_skipped(tmp_path: Path, task: Task, name: str, damage: bytes) -> None:
    folder = plant(tmp_path, task)
    path = folder.path / name
    content = path.read_bytes()
    path.write_bytes(damage)
    assert not finds(tmp_path, task)
    path.write_bytes(content + damage)
    before = path.read_bytes()
    assert finds(tmp_path, task)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", [WORKLOADS, RECORDS, VERDICTS])
def test_a_truncated_line_costs_only_itself(tmp_path: Path, task: Task, name: str) -> None:
    folder = plant(tmp_path, task)
    path = folder.path / name
    path.write_bytes(path.read_bytes()[:-20])
    assert not finds(tmp_path, task)
    plant(tmp_path, task)
    assert finds(tmp_path, task)


def test_tasks_are_equal_by_structure(task: Task) -> None:
    renamed = Task.of(task.mod["main"].with_attr("global_symbol", "another"))
    assert renamed == task
    assert hash(renamed) == hash(task)
    assert task != Task.of(record_function(task))


def record_function(task: Task) -> tvm.tirx.PrimFunc:
    schedule = tvm.s_tir.Schedule(task.mod)
    right(schedule)
    return schedule.mod["main"]


def test_meta_schedule_reads_the_files(tmp_path: Path, task: Task) -> None:
    folder = plant(tmp_path, task)
    database = ms.database.JSONDatabase(
        str(folder.path / WORKLOADS), str(folder.path / RECORDS), allow_missing=False
    )
    (record,) = database.get_all_tuning_records()
    assert Task(record.workload.mod) == task
    assert [float(s) for s in record.run_secs] == [1e-6]


def test_the_folder_is_named_after_the_target() -> None:
    plain = tvm.target.Target({"kind": "llvm", "mcpu": "znver5", "num-cores": 4})
    featured = tvm.target.Target(
        {"kind": "llvm", "mcpu": "znver5", "num-cores": 4, "mattr": ["-avx512f"]}
    )
    assert target_name(plain) == "llvm-znver5-4cores"
    assert target_name(featured).startswith("llvm-znver5-4cores-")


def test_two_folders_written_at_once_lose_nothing(tmp_path: Path, task: Task) -> None:
    first, second = (Folder.below(tmp_path, host_target()) for _ in range(2))
    for folder in (first, second):
        folder.open_for_writing()
    assert first.add_task(task) == second.add_task(task)
    for number in range(10):
        folder = (first, second)[number % 2]
        folder.add_records(0, [record_of(task, right, 1e-6 * (number + 1))])
    (entry,) = first.load().values()
    assert len(entry.records) == 10

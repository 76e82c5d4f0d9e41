"""Hostile record files: no code of them runs, nothing crashes, and the log names them."""

from __future__ import annotations

import base64
import json
import logging
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tvm.target import Target

from tests.records.planted import Softmax, plant, record_of, right, sample, softmax_task
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.records import Folder, Library, Task, jsonlines
from tvmbridge.records.allowed import STEPS, RefusedRecordError, scheduled_by, trace_refusal
from tvmbridge.records.folder import RECORDS, VERDICTS, WORKLOADS, Record, Verdict
from tvmbridge.records.jsonlines import SHIPPED, read_lines
from tvmbridge.records.meta import NAME as META
from tvmbridge.records.meta import Meta, read_meta
from tvmbridge.records.pending import NAME as PENDING
from tvmbridge.records.pending import read_pending
from tvmbridge.records.tasks import parse_workload
from tvmbridge.schedules.target import host_target

CODE = "define i32 @run() {\\n ret i32 0\\n}"
BLOCK = ["GetSBlock", [], ["T_softmax", "main"], ["b0"]]
LOOPS = ["GetLoops", ["b0"], [], ["l1", "l2"]]
DEEP: Any = 1
for _ in range(400):
    DEEP = [DEEP]

# By name: the steps after the first two of a trace, and words of the warning.
TRACES: dict[str, tuple[list[Any], str]] = {
    "imported code": (
        [["Annotate", ["b0", f'"{CODE}"'], ["pragma_import_llvm"], []]],
        "does not take the inputs",
    ),
    "a pragma": ([["Annotate", ["l1", 1], ["pragma_import_c"], []]], "attributes"),
    "another key": ([["Annotate", ["b0", 1], ["tirx.noalias"], []]], "attributes"),
    "a key that is a list": ([["Annotate", ["b0", 1], [["a"]], []]], "attributes"),
    "an unknown step": ([["Launch", ["b0"], [], []]], "instruction is not allowed"),
    "an intrinsic": ([["Tensorize", ["b0"], ["any", 1], []]], "instruction is not allowed"),
    "another function": (
        [["TransformLayout", ["b0", '{"a": 1}'], [0, 1, "None", 1], []]],
        "instruction is not allowed",
    ),
    "a huge number": (
        [["Annotate", ["b0", 10**30], ["meta_schedule.parallel"], []]],
        "does not take the inputs",
    ),
    "a large number": (
        [["Annotate", ["l1", 10**6], ["pragma_auto_unroll_max_step"], []]],
        "is not allowed",
    ),
    "a wide vector": (
        [["Split", ["l2", "None", 4096], [1, 0], ["l3", "l4"]], ["Vectorize", ["l4"], [], []]],
        "vectors of 4096",
    ),
    "a long loop": ([["Split", ["l2", "None", 2**30], [1, 0], ["l3", "l4"]]], "iterations"),
    "a loop that nobody named": ([["Parallel", ["l9"], [], []]], "does not take the inputs"),
    "names that are none": ([["GetLoops", ["b0"], [], [7, {}]]], "outputs are not named"),
    "a block that is not there": (
        [["GetSBlock", [], ["gelu", "main"], ["b5"]]],
        "cannot be applied",
    ),
    "more loops than there are": (
        [["GetLoops", ["b0"], [], ["l3", "l4", "l5", "l6"]]],
        "cannot be applied",
    ),
    "a loop twice": ([["Fuse", ["l1", "l1"], [1], ["l3"]]], "cannot be applied"),
    "too many steps": ([LOOPS] * 5000, "no trace of at most"),
    "a step that is none": ([3], "no trace"),
    "a step of numbers": ([[1, 2, 3, 4]], "no trace"),
}


@pytest.fixture(scope="module")
def task() -> Task:
    return softmax_task()


def planted_trace(log_dir: Path, task: Task, trace: Any) -> Record:
    """Write a folder whose verdict names a record with this trace; return the record."""
    folder = plant(log_dir, task)
    record = Record((trace, [1e-9], record_of(task, right, 1.0).content[2], []))
    folder.add_records(0, [record])
    folder.add_verdict(Verdict(folder.add_task(task)[1], 1, 2e-6, record.digest, 1e-9))
    return record


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_data(
    tmp_path: Path, task: Task, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps, words = TRACES[name]
    record = planted_trace(tmp_path, task, [[BLOCK, LOOPS, *steps], []])
    assert Library.open(str(tmp_path), host_target()).schedule(task) is None
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert record.digest in warning
    assert str(tmp_path) in warning
    assert words in warning


@pytest.mark.parametrize(
    "trace", [None, 3, "trace", {}, [], [[]], [[], 3], [[], [[0, 1]]], [[BLOCK], [[0, 1]]]]
)
def test_what_is_no_trace_is_skipped(tmp_path: Path, task: Task, trace: Any) -> None:
    planted_trace(tmp_path, task, trace)
    found = Library.open(str(tmp_path), host_target()).schedule(task)
    assert found is None


def test_a_module_is_compiled_beside_a_hostile_record(tmp_path: Path, task: Task) -> None:
    planted_trace(tmp_path, task, [[BLOCK, LOOPS, *TRACES["imported code"][0]], []])
    module, x = Softmax().eval(), sample()
    expected = module(x)
    add_tvm_dispatch(module, x, options={"tuning_logs": str(tmp_path)})
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)
    assert dispatch_report(module).specializations[0].kernels.tuned == 0


def test_each_step_is_refused_with_values_of_other_kinds() -> None:
    for name in STEPS:
        for value in (None, -(10**40), 1e300, "a" * 10**5, [], {}, DEEP, True):
            for place in (1, 2, 3):
                step: list[Any] = [name, [], [], []]
                step[place] = [value]
                assert trace_refusal([[BLOCK, LOOPS, step], []]) is not None


# By name: a change of a function's serialized graph, and words of the refusal.
GRAPHS: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "a compiled module": (
        lambda nodes: nodes.__setitem__(1, {"type": "ffi.Module", "data": "AAAA"}),
        "'ffi.Module' is not allowed",
    ),
    "a packed function": (
        lambda nodes: nodes.__setitem__(1, {"type": "ir.EnvFunc", "data": {"name": "f"}}),
        "'ir.EnvFunc' is not allowed",
    ),
    "a call of any symbol": (
        lambda nodes: nodes.__setitem__(1, {"type": "ir.Op", "data": "tirx.call_extern"}),
        "call_extern",
    ),
    "a circle": (lambda nodes: node_of(nodes, "ffi.Array").append(len(nodes) - 1), "may not hold"),
    "no node": (lambda nodes: node_of(nodes, "ffi.Array").append(10**9), "may not hold"),
    "a null": (lambda nodes: node_of(nodes, "tirx.For").__setitem__("body", 0), "field body"),
    "a field too few": (lambda nodes: node_of(nodes, "tirx.For").pop("body"), "other fields"),
    "a thread of a GPU": (lambda nodes: node_of(nodes, "tirx.For").update(kind=4), "field kind"),
    "a number too large": (
        lambda nodes: nodes.__setitem__(1, {"type": "int", "data": 2**70}),
        "value",
    ),
    "a graph that unfolds": (
        lambda nodes: nodes.extend(
            [{"type": "ffi.Array", "data": [len(nodes) + n - 1] * 2} for n in range(60)]
        ),
        "unfolds",
    ),
    "a deep one": (
        lambda nodes: nodes.extend(
            [{"type": "ffi.Array", "data": [len(nodes) + n - 1]} for n in range(10**5)]
        ),
        "nested deeper",
    ),
    "nodes that are none": (lambda nodes: nodes.__setitem__(1, [DEEP]), "no node"),
}


def node_of(nodes: list[Any], kind: str) -> Any:
    return next(node["data"] for node in nodes if node["type"] == kind)


def changed_graph(task: Task, change: Callable[[list[Any]], Any]) -> str:
    graph = json.loads(base64.b64decode(task.workload[1])[8:])
    change(graph["nodes"])
    text = json.dumps(graph).encode()
    return base64.b64encode(struct.pack("<Q", len(text)) + text).decode()


@pytest.mark.parametrize("name", GRAPHS)
def test_a_function_is_data(
    tmp_path: Path, task: Task, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, words = GRAPHS[name]
    encoded = changed_graph(task, change)
    with pytest.raises(RefusedRecordError, match=words):
        parse_workload(encoded)
    folder = plant(tmp_path, task)
    (folder.path / WORKLOADS).write_text(json.dumps(["1", encoded]) + "\n")
    assert Library.open(str(tmp_path), host_target()).schedule(task) is None
    assert f"{WORKLOADS}, line 1" in caplog.text
    (folder.path / PENDING).write_text(
        json.dumps({"task": ["1", encoded], "weight": 1, "origin": "x"}) + "\n"
    )
    assert read_pending(folder) == []
    assert f"{PENDING}, line 1" in caplog.text


@pytest.mark.parametrize("name", [META, WORKLOADS, RECORDS, VERDICTS])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**5,
        b"[" * 400 + b"]" * 400,
        b'{"a":' * 10**4,
        b"9" * 10**5,
        b"[0, [[[], []], [1e999, NaN], {}, []]]",
        b"[0, [[[], []], [" + b"9" * 400 + b"], {}, []]]",
        b'{"task": 1, "trials": ' + b"9" * 400 + b', "rule_seconds": "x"}',
        b'["99999999999999999999999999999999", "AAAA"]',
        b'[["a"], {"b": 1}]',
        b"\x00\xff\xfe",
    ],
)
def test_damage_on_purpose_is_skipped(
    tmp_path: Path, task: Task, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant(tmp_path, task)
    (folder.path / name).write_bytes(content)
    assert Library.open(str(tmp_path), host_target()).schedule(task) is None
    assert caplog.text


@pytest.mark.parametrize(
    "content",
    thinned(
        [
            b"[" + b"[]," * 2**21 + b"0]\n",
            b"[]\n" * 2**18,
            b"\n" * 2**20,
            (b"[" + b"{}," * 2**12 + b"0]\n") * 2**7,
            b'{"a":' * 2**20,
        ],
        2,
    ),
    ids=["one line", "many lines", "empty lines", "long lines", "deep"],
)
def test_a_file_of_empty_values_takes_little_memory(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the memory: as Python objects the values would take fifty times the file's bytes."""
    monkeypatch.setattr(jsonlines, "MOST_FILE_VALUES", 2**17)
    path = tmp_path / "records.json"
    path.write_bytes(content)
    tracemalloc.start()
    values = read_lines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values
    assert peak < 3 * len(content) + 2**22


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b"", []),
        (b"\n", [None]),
        (b"1\n2", [1, 2]),
        (b"1\n\n2\n", [1, None, 2]),
        (b"1\n\n", [1, None]),
    ],
)
def test_lines_keep_their_numbers(tmp_path: Path, content: bytes, values: list[Any]) -> None:
    path = tmp_path / "records.json"
    path.write_bytes(content)
    assert read_lines(path) == values


def test_all_records_that_come_with_tvmbridge_are_allowed() -> None:
    applied = 0
    for path in SHIPPED.iterdir():
        if not path.is_dir():
            continue
        meta = read_meta(path)
        assert isinstance(meta, Meta)
        workloads = read_lines(path / WORKLOADS)
        entries = Folder(path, Target(meta.target)).load()
        assert len(entries) == len(workloads)
        assert sum(len(entry.records) for entry in entries.values()) == len(
            read_lines(path / RECORDS)
        )
        for entry in entries.values():
            assert all(trace_refusal(record.trace) is None for record in entry.records)
            if entry.chosen is not None:
                scheduled_by(entry.task.mod, entry.chosen.trace)
                applied += 1
    assert applied == 18

"""The table of a conformance run: its rows, its summary, and the claims that the rows admit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance import admit
from tests.conformance.admit import proven_claims
from tests.conformance.runner import Entry
from tests.conformance.table import Table, describe, read_rows, share_right


def outcome(label: str, result: str, *, ordinary: bool = True, **used: Any) -> dict[str, Any]:
    return {
        "label": label,
        "result": result,
        "reason": "a reason",
        "ordinary": ordinary,
        "native": [],
        "aten": [],
        "joint": "",
        "used": {"converters": used},
    }


RIGHT = {"0": outcome("0", "native", f=["float32"]), "1": outcome("1", "native", f=["bool"])}
MIXED = {**RIGHT, "2": outcome("2", "wrong", f=["float32"], g=["float32"])}


def test_a_table_is_read_back(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows.jsonl", resume=False)
    table.record(Entry("a", "float32"), RIGHT)
    table.record(Entry("b", "float32", "auto"), MIXED)
    with table.path.open("a") as file:
        file.write('{"entry": "c/float32/forw')  # the run was killed here
    again = Table(table.path, resume=True)
    assert again.entries == table.entries == read_rows([table.path])
    assert again.has(Entry("a", "float32"))
    assert not again.has(Entry("a", "float32", "auto"))
    assert set(again.failures()) == {"b/float32/auto"}


def test_an_entry_is_of_its_worst_class(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows.jsonl", resume=False)
    empty = {"e": outcome("e", "aten_call", ordinary=False)}
    table.record(Entry("a", "float32"), {**RIGHT, **empty})
    table.record(Entry("b", "float32"), MIXED)
    assert table.entries["a/float32/forward"]["class"] == "native"
    assert table.entries["b/float32/forward"]["class"] == "wrong"
    assert "50.0%" in describe(table.entries)
    assert share_right({"native": 1, "mixed": 1, "aten_call": 1, "refused": 1}) == 0.75


def test_what_served_a_wrong_case_is_not_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: dict[str, dict[str, frozenset[str]]] = {
        "converters": {},
        "rules": {},
        "derivatives": {},
    }
    monkeypatch.setattr(admit, "admitted_table", lambda: nothing)
    table = Table(tmp_path / "rows.jsonl", resume=False)
    table.record(Entry("a", "float32"), MIXED)
    assert proven_claims(table.entries)["converters"] == {"f": {"bool"}}


def test_what_was_admitted_stays_when_another_operator_may_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"converters": {"f": frozenset({"float32"})}, "rules": {}, "derivatives": {}}
    monkeypatch.setattr(admit, "admitted_table", lambda: before)
    table = Table(tmp_path / "rows.jsonl", resume=False)
    table.record(Entry("a", "float32"), MIXED)
    assert proven_claims(table.entries)["converters"] == {"f": {"bool", "float32"}}

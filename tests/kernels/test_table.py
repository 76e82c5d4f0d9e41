"""The table of choices: kept between processes, checked when read; its errors stop nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tvmbridge.kernels import table
from tvmbridge.kernels.table import Table, choice, clear_tables

AMONG = ("a", "b")


def _never() -> str:
    raise AssertionError("it is known")


def test_a_second_process_takes_the_same_decision(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    assert Table(path).choice("which", AMONG, lambda: "b") == "b"
    assert Table(path).choice("which", AMONG, _never) == "b"


def test_what_another_process_has_decided_meanwhile_holds(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    first, second = Table(path), Table(path)
    first.choice("other", AMONG, lambda: "a")
    second.choice("other", AMONG, _never)
    assert first.choice("which", AMONG, lambda: "a") == "a"
    assert second.choice("which", AMONG, lambda: "b") == "a"


def test_an_answer_that_is_no_candidate_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    Table(path).choice("which", ("old",), lambda: "old")
    assert Table(path).choice("which", AMONG, lambda: "a") == "a"
    assert Table(path).choice("which", AMONG, _never) == "a"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"version": 1}', b'{"version": 1, "choices": 3}']
)
def test_what_is_damaged_is_not_used(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "choices.json"
    path.write_bytes(content)
    kept = Table(path)
    assert kept.choice("which", AMONG, lambda: "a") == "a"
    assert kept.choice("which", AMONG, _never) == "a"
    assert len([r for r in caplog.records if "are not used" in r.message]) == 1


def test_what_others_may_write_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    Table(path).choice("which", AMONG, lambda: "b")
    path.chmod(0o666)
    assert Table(path).choice("which", AMONG, lambda: "a") == "a"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Table(tmp_path / "file" / "choices.json")
    assert kept.choice("which", AMONG, lambda: "a") == "a"
    assert kept.choice("which", AMONG, _never) == "a"


def test_the_folder_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_tables", {})
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    assert choice("which", AMONG, lambda: "b") == "b"
    (path,) = (tmp_path / "new").glob(table.PATTERN)
    ((question, answer),) = json.loads(path.read_text())["choices"].items()
    assert question.startswith("which, ")
    assert answer == "b"
    assert clear_tables(tmp_path / "new") == 1
    assert choice("which", AMONG, lambda: "a") == "a"
    monkeypatch.setenv("TVMBRIDGE_CACHE", "0")
    assert choice("further", AMONG, lambda: "a") == "a"
    assert len(list((tmp_path / "new").iterdir())) == 1

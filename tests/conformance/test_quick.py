"""The quick set of the conformance run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.quick import QUICK_OPERATORS
from tests.conformance.table import FAILURES, read_rows
from tests.planted.plant import VARIABLE


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_set_agrees_with_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No operator is wrong, crashes or cannot be compiled, in any dtype, nor is a gradient."""
    out = str(tmp_path / "table.jsonl")
    assert main(["--quick", "--workers", "2", "--out", out]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "operator", "mode"),
    [
        ("gelu by tanh", "nn.functional.gelu", "forward"),
        ("scale of erf's gradient", "erf", "relax"),
    ],
)
def test_an_admitted_claim_that_is_wrong_fails_and_other_operators_agree_with_eager(
    mistake: str, operator: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake in a converter or rule that the table admits makes the run fail."""
    monkeypatch.setenv(VARIABLE, mistake)
    path = tmp_path / "table.jsonl"
    operators = {operator, *QUICK_OPERATORS[::30]}
    only = ["--ops", *sorted(operators), "--modes", mode, "--samples", "1"]
    assert main([*only, "--out", str(path)]) == 1
    rows = read_rows([path])
    assert len(rows) >= len(operators)
    wrong = {name: row["cases"] for name, row in rows.items() if FAILURES & set(row["cases"])}
    assert wrong.keys() == {f"{operator}/float32/{mode}"}
    assert "wrong" in wrong[f"{operator}/float32/{mode}"]

"""The quick set of the conformance run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.__main__ import main
from tests.conformance.check import Check
from tests.conformance.coverage import operators
from tests.conformance.quick import QUICK_OPERATORS
from tests.conformance.samples import cases_of
from tests.conformance.table import FAILURES, read_rows
from tests.planted.plant import VARIABLE
from tvmbridge.frontend.registry import CONVERTERS


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_set_agrees_with_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No operator is wrong, crashes or cannot be compiled, in any dtype, nor is a gradient."""
    out = str(tmp_path / "table.jsonl")
    assert main(["--quick", "--workers", "2", "--out", out]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("mistaken", [False, True])
def test_a_wrong_converter_fails_where_the_right_one_agrees(
    mistaken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that is wrong for one operator fails in the comparison that each entry gets."""
    right = CONVERTERS[torch.ops.aten.gelu.default]

    def by_tanh(importer: Any, node: Any, x: Any, approximate: str = "none") -> Any:
        return right.function(importer, node, x, "tanh" if mistaken else approximate)

    wrong = replace(right, function=by_tanh)
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.gelu.default, wrong)
    name = "nn.functional.gelu"
    case = next(case for case in cases_of(name, torch.float32, 2) if case.ordinary)
    (outcome,) = Check(operators()[name].op).group([case])
    assert outcome.result == ("wrong" if mistaken else "native")
    assert (outcome.result in FAILURES) is mistaken


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

"""The quick set of the conformance run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.planted.plant import VARIABLE


def run(size: str, folder: Path) -> int:
    return main(["--quick", size, "--workers", "2", "--out", str(folder / "table.jsonl")])


@pytest.mark.timeout(1200)
def test_each_operator_agrees_with_eager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No operator of the quick set is wrong, crashes or cannot be compiled in float32."""
    assert run("once", tmp_path) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_set_agrees_with_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other dtypes agree too, and the gradients by both sources of the joint function."""
    assert run("whole", tmp_path) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("mistake", "operator", "mode"),
    [
        ("gelu by tanh", "nn.functional.gelu", "forward"),
        pytest.param("scale of erf's gradient", "erf", "relax", marks=pytest.mark.slow),
    ],
)
def test_an_admitted_claim_that_is_wrong_fails(
    mistake: str,
    operator: str,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A planted mistake in a converter or rule that the table admits makes the run fail."""
    monkeypatch.setenv(VARIABLE, mistake)
    only = ["--ops", operator, "--modes", mode, "--samples", "1"]
    assert main([*only, "--out", str(tmp_path / "table.jsonl")]) == 1
    assert f"{operator}/float32/{mode}: wrong" in capsys.readouterr().out

"""The quick set of the conformance run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.__main__ import main


@pytest.mark.timeout(1200)
def test_quick_set_agrees_with_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No operator of the quick set is wrong, crashes or cannot be compiled."""
    status = main(["--quick", "--workers", "2", "--out", str(tmp_path / "table.jsonl")])
    assert status == 0, capsys.readouterr().out

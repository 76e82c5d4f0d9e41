"""Comparison and dispatch reports as plain text."""

from __future__ import annotations

import pytest

from tvmbridge import ComparisonReport, DispatchReport
from tvmbridge.inspect.compare.report import Figure

FIGURE = Figure("output", "eager", 1e-7, 1e-5, 0.0, 1e-14, "rounding")


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (ComparisonReport("float32", ("eager",), ("output",), (FIGURE,), ()), "rounding"),
        (DispatchReport(0, {"a submodule has hooks": 1}, [], []), "a submodule has hooks"),
    ],
    ids=["comparison", "dispatch"],
)
def test_plain_text_in_a_notebook(
    report: object, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a notebook the kernel sets FORCE_COLOR, and rich displays its output in the page.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert text in str(report)
    assert "\x1b" not in str(report)

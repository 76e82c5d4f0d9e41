"""The table of reasons: each kind says what to do, and docs/limits.md shows all of them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from tvmbridge.core.reasons import Category, Kind, Reason, with_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits.md"


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_a_kind_has_advice_and_at_most_one_place_for_the_detail(kind: Kind) -> None:
    assert kind.advice or kind is Kind.COMPILING
    assert kind.sentence.count("{") == kind.sentence.count("{}") <= 1
    reason = Reason(kind, "argument `x`: {odd}")
    assert str(reason).count("argument `x`: {odd}") == 1
    assert (reason.text == kind.sentence) is ("{}" not in kind.sentence)


def test_a_reason_that_settles_needs_no_advice() -> None:
    reason = Reason(Kind.CHANGED, "the attribute cos", settles=True)
    assert (reason.text, reason.advice) == ("the attribute cos changed", "")
    assert "further calls find it set" in str(reason)
    assert pickle.loads(pickle.dumps(reason)) == reason


def test_each_kind_is_used() -> None:
    sources = [p.read_text() for p in (ROOT / "tvmbridge").rglob("*.py") if p.name != "reasons.py"]
    used = set(re.findall(r"\bKind\.([A-Z_]+)\b", "\n".join(sources)))
    assert used == {kind.name for kind in Kind if kind.category is not Category.DIFFERS}


def test_the_page_of_limits_shows_the_table() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run `python -m tvmbridge.core.reasons docs/limits.md`"
    for kind in Kind:
        assert kind.sentence.format("...") in page

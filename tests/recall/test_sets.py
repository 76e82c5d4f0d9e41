"""Code that makes sets is told from code that only tests for their class."""

from __future__ import annotations

from typing import Any

import pytest

from tvmbridge.recall.sets import makes_sets


@pytest.mark.parametrize(
    ("text", "makes"),
    [
        ("isinstance(v.a, (list, set))", False),
        ("kind in (list, set)", False),
        ("isinstance(v(set), list)", True),
        ("isinstance(v(set, (list,)), list)", True),
        ("v(set, kind in (list, v))", True),
        ("v.isinstance(kind, set)", True),
    ],
)
def test_classes_in_tests_are_no_sets(text: str, makes: bool) -> None:
    scope: dict[str, Any] = {}
    exec(f"def read(v, kind):\n    return {text}", scope)
    assert makes_sets(scope["read"].__code__) is makes

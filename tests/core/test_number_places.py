"""Places of numbers in modules: where two values differ, and assignments to places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tvmbridge.core.contents import MISSING, AnyNumber, PartOf, same_value
from tvmbridge.core.number_places import (
    label_of,
    marked_places,
    number_in,
    numbers_changed,
    set_number_in,
)

KEY = ("net", "config", (".", "loss"), ("[", "beta"), ("[", 1))


@pytest.mark.parametrize(
    ("now", "expected", "found"),
    [
        (1, 2, [()]),
        (1.0, 1, [()]),
        (True, 1, None),
        ("a", "b", None),
        ([1, {"a": 2.0}], [1, {"a": 3.0}], [(("[", 1), ("[", "a"))]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": 1, "b": "x"}, {"a": 2, "b": "y"}, None),
        ((1, 2), (1, 3), None),
        (SimpleNamespace(a=1, b=2), PartOf(SimpleNamespace, {"a": 2}), [((".", "a"),)]),
        (SimpleNamespace(a=1, b=2), SimpleNamespace(a=2), None),
        ([1, 2], [1, AnyNumber("x")], []),
    ],
)
def test_steps_to_the_numbers_that_differ(now: Any, expected: Any, found: Any) -> None:
    assert numbers_changed(now, expected) == found


def test_places_are_read_and_set() -> None:
    module: Any = nn.Module()
    module.config = SimpleNamespace(loss={"beta": [1, 2]})
    names = KEY[1:]
    set_number_in(module, names, 3)
    assert number_in(module, names) == 3
    assert label_of(KEY) == "net.config.loss['beta'][1]"
    assert number_in(module, (*names, ("[", 0))) is MISSING
    set_number_in(module, (*names[:-1], ("[", 9)), 3)
    assert module.config.loss == {"beta": [1, 3]}


def test_marks_match_numbers_alone_and_are_found() -> None:
    mark = AnyNumber("x")
    assert [same_value(now, mark) for now in (1, 0.5, True, None)] == [True, True, False, False]
    part = PartOf(SimpleNamespace, {"n": mark})
    values = {("", "a"): {"k": [mark]}, ("b", "c"): part, ("", "d"): 1}
    assert marked_places(values) == {"x": [("", "a", ("[", "k"), ("[", 0)), ("b", "c", (".", "n"))]}

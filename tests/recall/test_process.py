"""A plan is not used if it depends on state that the next process may not have."""

from __future__ import annotations

import decimal
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.recall.models import load, plans_in
from tests.recall.test_recall import _OPTIONS, _look
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.recall.sets import makes_sets

_SOURCE = """
import abc
import logging

from torch import nn

LEVELS = {0, 8}
KINDS = {1, 9}
LOG = logging.getLogger("tests.recall.process")


class Thing:
    pass


class Kind(abc.ABC):
    pass


class Below(Kind):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.thing = Thing()

    def forward(self, x):
        for level in LEVELS:
            x = x * 2 + level
        x = x + 7 if x.ndim in KINDS else x
        x = x * 3 if isinstance(self.thing, Kind) else x
        x = x * 5 if LOG.isEnabledFor(logging.DEBUG) else x
        return x + [len(text) for text in {str(x.ndim), "ten"}][0]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with plans_in(tmp_path):
        yield tmp_path


def _other_order(space: Any, _: pytest.MonkeyPatch) -> None:
    before, space.LEVELS = list(space.LEVELS), {8, 0}
    assert list(space.LEVELS) != before  # 0 and 8 have one place in a table of 8


def _other_members_order(space: Any) -> None:
    before, space.KINDS = list(space.KINDS), {9, 1}
    assert list(space.KINDS) != before


def _other_hashes(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tvmbridge.recall.walk.order_of_sets", lambda: "another order")


_CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "the order of a set": _other_order,
    "the hashes of texts": _other_hashes,
    "a registered class": lambda space, _: space.Kind.register(space.Thing),
    "a class that is registered below": lambda space, _: space.Below.register(space.Thing),
    "the level of a logger": lambda space, patch: patch.setattr(space.LOG, "level", logging.DEBUG),
    "all loggers": lambda _, patch: patch.setattr(logging.root.manager, "disable", logging.ERROR),
}


def test_another_process_may_differ(folder: Path) -> None:
    x = torch.linspace(-1, 1, 8)
    with torch.no_grad():
        add_tvm_dispatch(load(folder, _SOURCE).Model().eval(), (x,), options=_OPTIONS)
        assert _look(load(folder, _SOURCE).Model().eval(), (x,))[1] == ""
        for name, change in _CHANGES.items():
            space = load(folder, _SOURCE)
            with pytest.MonkeyPatch.context() as patch:
                change(space, patch)
                compiled, why = _look(space.Model().eval(), (x,))
            assert compiled is None, name
            assert why, name
        space = load(folder, _SOURCE)
        _other_members_order(space)
        assert _look(space.Model().eval(), (x,))[1] == ""


def _documented() -> None:
    """A text."""


_ASKED: dict[str, tuple[Callable[[], int], str]] = {
    "the interpreter": (lambda: sys.getrecursionlimit() % 7, "a setting of the process"),
    "threads": (threading.active_count, "may return something else"),
    "the context of decimals": (lambda: decimal.getcontext().prec, "may return something else"),
    "loggers": (lambda: logging.getLogger("tests").level, "a setting of the process"),
    "a docstring": (lambda: len(str(_documented.__doc__)), "__doc__"),
}


class _Asks(nn.Module):
    def __init__(self, asked: Callable[[], int]) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.asked()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("asked", [*_ASKED])
def test_what_a_process_is_asked_is_captured(asked: str) -> None:
    module, x = _Asks(_ASKED[asked][0]).eval(), torch.linspace(-1, 1, 8)
    expected = module(x)
    add_tvm_dispatch(module, (x,), options=_OPTIONS)
    assert torch.equal(module(x), expected)
    assert _ASKED[asked][1] in dispatch_report(module).specializations[0].recalled


@pytest.mark.parametrize(
    ("function", "makes"),
    [
        (lambda x: x in {"a", "b"}, False),
        (lambda x: [x for _ in {"a", "b", "c"}], True),
        (lambda x: {x, "b"}, True),
        (lambda x: {str(each) for each in x}, True),
        (lambda x: frozenset(x), True),
        (lambda x: (x, "set"), False),
        (lambda x: isinstance(x, set), False),
        (lambda x: isinstance(x.held, (tuple, set, frozenset)) and len(x), False),
        (lambda x: type(x) in (list, set), False),
        (lambda x: map(set, x), True),
        (lambda x: [kind(x) for kind in (list, set)], True),
        (lambda x: isinstance(x, set) or set(x), True),
    ],
)
def test_code_that_makes_sets(function: Any, makes: bool) -> None:
    inner = [c for c in function.__code__.co_consts if isinstance(c, type(function.__code__))]
    assert any(map(makes_sets, (function.__code__, *inner))) is makes

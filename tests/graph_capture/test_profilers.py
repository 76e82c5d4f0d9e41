"""A profiling function that raises at any event of a trace leaves PyTorch's state as it was."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

import pytest
import torch

from tests import process_state
from tests.dispatch_helpers import make_block, sample
from tests.thinned import thinned
from tvmbridge import capture

# Functions of contexts, and which of their events: the second one may be the end of the context.
EVENTS = [
    ("patched_here", 1),
    ("answers_here", 1),
    ("collections_put_off", 1),
    ("tracing_here", 1),
    ("_failures_not_logged", 2),
    ("_hashes_watched", 1),
    ("recorded_reads", 1),
    ("patched_here", 2),
]


class Stop(BaseException):
    """What the profiling function raises."""


class Profiler:
    """Raises at the ``number``-th return or yield of the generator function ``name``."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.left = name, number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and code.co_name == self.name:
            assert code.co_flags & inspect.CO_GENERATOR
            self.left -= 1
            if self.left == 0:
                raise Stop


@pytest.mark.parametrize(("name", "number"), thinned(EVENTS, 3))
def test_a_profiler_that_raises_in_a_trace(name: str, number: int) -> None:
    module, x = make_block().eval(), sample()
    capture(module, x)
    before = process_state.now()
    sys.setprofile(Profiler(name, number))
    try:
        with pytest.raises(Stop):
            capture(module, x)
        assert sys.getprofile() is None  # as CPython leaves it
    finally:
        sys.setprofile(None)
    assert process_state.changed(before, process_state.now()) == []
    torch.testing.assert_close(module(x), make_block().eval()(x))


def test_a_profiler_that_does_not_raise_sees_the_trace_and_stays() -> None:
    seen: set[str] = set()

    def profiler(frame: FrameType, event: str, _: object) -> None:
        seen.add(frame.f_code.co_name)

    sys.setprofile(profiler)
    try:
        capture(make_block().eval(), sample())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert {"tracing_here", "patched_here"} <= seen

"""Locks are free after an error, and after a profiling function that raises at any event."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import pytest

from tvmbridge.core.locks import Lock


class Stop(BaseException):
    """What the profiling function raises."""


def _enter(lock: Lock) -> None:
    with lock:
        len(())


def _enter_interrupted(lock: Lock, number: int) -> bool:
    """Enter ``lock`` with a profiling function that raises at event ``number``; whether it did."""
    events = 0

    def profiler(frame: FrameType, _: str, __: object) -> None:
        nonlocal events
        events += frame.f_code is _enter.__code__
        if events == number:
            raise Stop

    sys.setprofile(profiler)
    try:
        _enter(lock)
    except Stop:
        return True
    finally:
        sys.setprofile(None)
    return False


def _is_free(lock: Lock) -> bool:
    other = threading.Thread(target=_enter, args=(lock,), daemon=True)
    other.start()
    other.join(timeout=10)
    return not other.is_alive()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_profiling_function_that_raises_leaves_no_lock_held(reentrant: bool) -> None:
    number, raised = 0, True
    while raised:
        number += 1
        lock = Lock(reentrant=reentrant)
        raised = _enter_interrupted(lock, number)
        assert _is_free(lock), number
    assert number > 3


def test_an_error_releases_the_lock() -> None:
    lock = Lock()
    with pytest.raises(ValueError, match="stop"), lock:
        raise ValueError("stop")
    assert _is_free(lock)


def test_a_thread_that_holds_a_reentrant_lock_enters_it_again_and_keeps_others_out() -> None:
    lock, entered = Lock(reentrant=True), threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    other = threading.Thread(target=enter, daemon=True)
    with lock, lock:
        other.start()
        assert not entered.wait(timeout=0.1)
    other.join(timeout=10)
    assert entered.is_set()

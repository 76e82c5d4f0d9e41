"""Locks are free after an error, and after a profiling function that raises at any event."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import tvmbridge_runtime.locks

from tvmbridge.core.locks import Lock
from tvmbridge.core.turns import another_compiles, compiling

ROOT = Path(__file__).parents[2]
# A file that only tries to take a lock, and does not wait for it.
TRIES = "speed_trial.py"


class Stop(BaseException):
    """What the profiling function raises."""


def _enter(make: Callable[[], Lock]) -> None:
    with make():
        len(())


def _enter_interrupted(make: Callable[[], Lock], number: int) -> bool:
    """Create and enter a lock with a profiling function that raises at event ``number``.

    Return whether there were as many events.
    """
    events = 0

    def profiler(frame: FrameType, _: str, __: object) -> None:
        nonlocal events
        caller = frame if frame.f_code is _enter.__code__ else frame.f_back
        events += caller is not None and caller.f_code is _enter.__code__
        if events == number:
            raise Stop

    sys.setprofile(profiler)
    try:
        _enter(make)
    except Stop:
        return True
    finally:
        sys.setprofile(None)
    return False


def _is_free(lock: Lock) -> bool:
    other = threading.Thread(target=_enter, args=(lambda: lock,), daemon=True)
    other.start()
    other.join(timeout=10)
    return not other.is_alive()


LOCKS = [Lock, lambda: Lock(reentrant=True), tvmbridge_runtime.locks.Lock, compiling]


@pytest.mark.parametrize("make", LOCKS, ids=["plain", "reentrant", "runtime", "compiling"])
def test_a_profiling_function_that_raises_leaves_no_lock_held(make: Callable[[], Lock]) -> None:
    number, raised = 0, True
    while raised:
        number += 1
        raised = _enter_interrupted(make, number)
        assert _is_free(make()), number
    assert number > 3


def test_whether_another_thread_compiles() -> None:
    found: list[bool] = []

    def ask() -> None:
        other = threading.Thread(target=lambda: found.append(another_compiles()))
        other.start()
        other.join()

    ask()
    with compiling(), compiling():
        ask()
        assert not another_compiles()
    ask()
    assert found == [False, True, False]


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("tvmbridge", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.name, ast.parse(path.read_text())


def test_no_generator_yields_with_a_lock_held_and_no_other_locks_are_used() -> None:
    yielding, others = [], []
    for file, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.With):
                held = [ast.unparse(item.context_expr).lower() for item in node.items]
                if any(name.endswith(("lock", "compiling()")) for name in held):
                    yielding += [file for n in ast.walk(node) if isinstance(n, ast.Yield)]
            elif isinstance(node, ast.Attribute) and node.attr in ("Lock", "RLock"):
                others.append(file)
    assert yielding == []
    assert set(others) <= {"locks.py", "__init__.py", TRIES}, others


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

"""Let a profiling function raise only where the contexts of a trace can end.

If the function of ``sys.setprofile`` raises where a generator yields, CPython drops the generator,
and what ``contextmanager`` has set stays set. If it raises at the call of an ``__exit__``, this is
not run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def profiler_errors_put_off() -> Iterator[None]:
    """Within the context, raise what this thread's profiling function raises at the next call.

    If there is no such call, the error is raised on exit. ``cProfile`` never raises.
    """
    profiler = sys.getprofile()
    if not callable(profiler) or isinstance(profiler, _ErrorsPutOff):
        yield
        return
    instead = _ErrorsPutOff(profiler)
    sys.setprofile(instead)
    try:
        yield
    finally:
        if sys.getprofile() is instead:
            sys.setprofile(None if instead.error else profiler)
        if instead.error:
            raise instead.error


class _ErrorsPutOff:
    """A profiling function that calls another one, ``profiler``, and may raise its error later.

    - ``error``: the error that is not yet raised. As in CPython, it ends the profile.
    """

    def __init__(self, profiler: Callable[..., Any]) -> None:
        self.profiler = profiler
        self.error: BaseException | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.error is None:
            try:
                self.profiler(frame, event, argument)
            except BaseException as error:
                self.error = error
        pending = self.error
        if pending is not None and _may_raise(frame, event):
            self.error = None
            raise pending


def _may_raise(frame: FrameType, event: str) -> bool:
    """Whether a plain function is called, and not on the way out of a context."""
    if event != "call" or frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_name != "__exit__":
        caller = caller.f_back
    return caller is None

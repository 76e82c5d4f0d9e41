"""A thread that polls a condition while other threads may be blocked."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

_SECONDS = 0.2


class Poller:
    """Calls a method regularly until it returns True, its object is freed, or :meth:`end`."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._stop = stop = threading.Event()
        method = weakref.WeakMethod(look)

        def watch() -> None:
            while not stop.wait(_SECONDS):
                found = method()
                if found is None or found():
                    return
                del found

        self._thread = threading.Thread(target=watch, name="tvmbridge-pipeline", daemon=True)
        self._thread.start()
        # A thread that runs PyTorch code while the interpreter exits would abort the process.
        atexit.register(self.end)

    def end(self) -> None:
        """Stop, and wait until a running call has returned."""
        self._stop.set()
        self._thread.join()
        atexit.unregister(self.end)

"""A thread that looks for what has happened, while the others may be waiting for it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

_SECONDS = 0.2


class Poller:
    """Calls a method now and then, until it returns True, its object is gone, or :meth:`end`."""

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
        # A thread that is within PyTorch when the interpreter ends would abort the process.
        atexit.register(self.end)

    def end(self) -> None:
        """Stop, and wait for the call that is under way."""
        self._stop.set()
        self._thread.join()
        atexit.unregister(self.end)

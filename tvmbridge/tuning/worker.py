"""A process of its own for what may crash or hang: TVM's search, its compiler, its kernels."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from tvmbridge.core.errors import BridgeError

# The worker begins as TVM's own program and does not import the caller's script, so that needs no
# guard. It imports from where the caller does, and on Linux it ends with the caller.
_SETUP = """
import sys
sys.path[:] = {path!r}
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
import torch
torch.set_num_threads({threads})
"""
_START_SECONDS = 300.0


class WorkerError(Exception):
    """A call that did not return: the message says whether it raised, crashed or took too long.

    ``late`` is set for the last of these, which another time may end better.
    """

    late = False


class Worker:
    """One process that calls functions one after another; after a crash a new one takes over."""

    def __init__(self, threads: int = 1) -> None:
        """``threads`` is the number of PyTorch's threads in the process."""
        try:
            import cloudpickle  # noqa: F401
            import psutil  # noqa: F401
            from tvm.support.popen_pool import PopenWorker
        except ImportError as error:
            raise BridgeError(
                f"tuning needs the package {error.name}: pip install 'tvmbridge[tune]'"
            ) from error
        setup = _SETUP.format(path=[os.path.abspath(p) for p in sys.path], threads=threads)
        quiet = subprocess.DEVNULL
        self._worker = PopenWorker(exec, (setup,), stdout=quiet, stderr=quiet)
        self._pid: int | None = None
        self.starts = 0
        self.calls = 0

    @property
    def running(self) -> bool:
        """Whether there is a process, with what earlier calls left in it."""
        return self._pid is not None

    def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """``function(*args)`` in the process, with ``timeout`` seconds to return.

        Raises:
            WorkerError: it raised, the process ended, or the time was over.
        """
        if self._pid is None:
            self._pid = int(self._receive(os.getpid, (), _START_SECONDS))
            self.starts += 1
        self.calls += 1
        return self._receive(function, args, timeout)

    def _receive(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
        self._worker.send(function, args)
        late = threading.Event()
        watch = threading.Timer(timeout, self._end, (late,))
        watch.daemon = True
        watch.start()
        try:
            return self._worker.recv()
        except ChildProcessError as error:
            self._pid = None
            what = f"no answer within {timeout:.0f} s" if late.is_set() else "the process crashed"
            failure = WorkerError(what)
            failure.late = late.is_set()
            raise failure from error
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise WorkerError(lines[-1] if lines else type(error).__name__) from error
        finally:
            watch.cancel()

    def _end(self, late: threading.Event) -> None:
        late.set()
        if self._pid is not None:
            # Windows has no SIGKILL; its SIGTERM ends a process all the same.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, getattr(signal, "SIGKILL", signal.SIGTERM))

    def close(self) -> None:
        """End the process; another call starts a new one."""
        self._worker.kill()
        self._pid = None
        self.calls = 0

"""A worker process for calls that may crash or hang: TVM's search, its compiler, its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tvmbridge.core.errors import BridgeError

# The worker runs TVM's own program and does not import the caller's script, so the script needs no
# ``if __name__ == "__main__"``. It has the caller's sys.path, and on Linux it ends with the caller.
_SETUP = """
import sys
sys.path[:] = {path!r}
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
import torch
torch.set_num_threads({threads})
"""


class WorkerError(Exception):
    """A call in the worker raised, crashed the process or took too long, as the message says.

    - ``late``: whether it took too long; a later attempt may then succeed.
    """

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Worker:
    """One process that calls functions one after another; after a crash a new process starts."""

    def __init__(self, threads: int = 1) -> None:
        """Prepare a process with ``threads`` PyTorch threads, which the first call starts."""
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
        self.running = False  # whether there is a process, which has the state of earlier calls
        self.starts = 0
        self.calls = 0

    def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """Return ``function(*args)``, called in the process within ``timeout`` seconds.

        Raises:
            WorkerError: the call raised, the process ended, or the timeout passed.
        """
        self.starts += not self.running
        self.running = True
        self.calls += 1
        try:
            self._worker.send(function, args, timeout=timeout)
            return self._worker.recv()
        except TimeoutError as error:
            self.running = False
            raise WorkerError(f"no answer within {timeout:.0f} s", late=True) from error
        except ChildProcessError as error:
            self.running = False
            raise WorkerError("the process crashed") from error
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise WorkerError(lines[-1] if lines else type(error).__name__) from error

    def close(self) -> None:
        """End the process; another call starts a new one."""
        self._worker.kill()
        self.running = False
        self.calls = 0

"""A compilation in a child process, which stores the code in the cache on disk.

The child is forked, so it has the module, the arguments, the mode and all settings of the call,
and nothing is pickled. It runs on one thread, since PyTorch's threads are not forked, at a lower
priority, and ends with its parent. It does not measure kernels itself. It asks the parent, on whose
threads the code will run, and waits for the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from tvmbridge.core import errors
from tvmbridge.core.errors import BridgeError, BuildError, first_line
from tvmbridge.core.machine import compile_for_threads, threads
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.graph_capture.surroundings import undisturbed
from tvmbridge.kernels.table import ask_elsewhere, choice

# A child that has sent no message for this time is taken to hang, and is killed.
MOST_SECONDS = 1800.0
# If all cores are busy, a child of this niceness gets about a quarter of a core.
NICENESS = 5
_PR_SET_PDEATHSIG = 1

_ASKED, _DONE, _FAILED = "asked", "done", "failed"


def cannot_fork() -> Reason | None:
    """Return why this thread cannot compile in a child process; None if it can."""
    if sys.platform != "linux":
        return Reason(Kind.NOT_LINUX)
    if threading.current_thread() is not threading.main_thread():
        return Reason(Kind.OTHER_THREAD)
    if multiprocessing.current_process().daemon:
        return Reason(Kind.DAEMON)
    return Reason(Kind.ACCELERATOR) if torch.accelerator.is_available() else None


class Child:
    """A child process that runs one compilation and ends.

    Args:
        body: the compilation; its result is discarded.
    """

    def __init__(self, what: str, body: Callable[[], object]) -> None:
        self.what = what
        self.started = self._heard = time.monotonic()
        self.error: BridgeError | None = None
        self._ended = False
        self._connection, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_run, args=(body, other, os.getpid()), name="tvmbridge-compilation", daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 and later warn of a fork of a process with threads, which is safe here:
            # the child uses one thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        other.close()

    @property
    def pid(self) -> int | None:
        """Return the process id of the child."""
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` and answer the child's requests; return whether it has ended."""
        until = time.monotonic() + seconds
        while not self._ended:
            left = max(0.0, until - time.monotonic())
            if self._connection.poll(min(left, 1.0)):
                self._hear()
            elif time.monotonic() - self._heard > MOST_SECONDS:
                self.end(f"nothing was heard of it for {MOST_SECONDS:.0f} s")
            elif left <= 0.0:
                break
        return self._ended

    def end(self, reason: str) -> None:
        """Kill the child process, and report ``reason`` as the error of the compilation."""
        self._process.kill()
        self._over(BuildError(f"{self.what} in the background: {reason}"))

    def _hear(self) -> None:
        self._heard = time.monotonic()
        try:
            kind, content = self._connection.recv()
            if kind == _ASKED:
                with undisturbed():
                    self._connection.send(choice(*content))
                return
        except (EOFError, OSError):
            self._process.join(1.0)
            self._over(BuildError(f"{self.what} in the background: {self._death()}"))
        except Exception as error:
            self.end(f"a kernel cannot be measured: {first_line(error)}")
        else:
            self._over(_error_of(*content) if kind == _FAILED else None)

    def _over(self, error: BridgeError | None) -> None:
        self.error, self._ended = error, True
        self._connection.close()
        self._process.join(1.0)

    def _death(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        return "the process has ended"


def _run(body: Callable[[], object], connection: Connection, parent: int) -> None:
    """Run the compilation in the child, send the result, and exit."""
    try:
        _settle(parent)
        ask_elsewhere(partial(_ask, connection))
        body()
        connection.send((_DONE, None))
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send((_FAILED, _described(error)))
    finally:
        # The child must not run the program's exit handlers.
        os._exit(0)


def _settle(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.nice(NICENESS)
    compile_for_threads(threads())
    torch.set_num_threads(1)
    # The parent logs the compilation.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # The program's signal handlers are meant for the parent. Ctrl-C reaches both processes, and
    # the parent decides what it means.
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ask(
    connection: Connection, question: str, among: Sequence[str], measure: Callable[[], str]
) -> str:
    connection.send((_ASKED, (question, among, measure)))
    return str(connection.recv())


def _described(error: BaseException) -> tuple[str, str, dict[str, Any]]:
    """Return class name, text and attributes of an error, to be sent to the parent.

    The name is of the nearest class in :mod:`tvmbridge.core.errors`, since the parent may not be
    able to unpickle another class; empty if there is none.
    """
    known = [c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c]
    text = str(error) if known else f"{type(error).__name__}: {first_line(error)}"
    try:
        pickle.dumps(error.__dict__)
    except Exception:
        return known[0].__name__ if known else "", text, {}
    return known[0].__name__ if known else "", text, dict(error.__dict__)


def _error_of(name: str, text: str, attributes: dict[str, Any]) -> BridgeError:
    error: BridgeError = getattr(errors, name, BuildError)(text)
    error.__dict__.update(attributes)
    return error

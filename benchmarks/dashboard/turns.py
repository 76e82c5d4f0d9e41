"""Processes that measure at the same time: while one takes times, all others are stopped.

A process that compiles beside a measurement takes cores and the GPU, so a lock that only other
measurements respect is not enough. The process asks for a turn by a line on its output; the parent
stops the others (SIGSTOP), answers by a line on its input, and continues them (SIGCONT) afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

# Seconds in which a GPU runs what stopped processes have launched.
_DRAINING = 1.0
_ASKS, _RETURNS = {"turn": True}, {"turn": False}


@contextmanager
def turn(shared: bool) -> Iterator[None]:
    """In a measuring process: wait until the parent has stopped the others, if there are any."""
    if shared:
        print(json.dumps(_ASKS), flush=True)
        sys.stdin.readline()
    try:
        yield
    finally:
        if shared:
            print(json.dumps(_RETURNS), flush=True)


class Turns:
    """In the parent: the measuring processes, each the leader of a session of its own."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._free = threading.Lock()
        self._holder: subprocess.Popen[str] | None = None

    def started(self, command: Sequence[str], **given: Any) -> subprocess.Popen[str]:
        """Start a process, with pipes for its input and output; wait for the end of a turn."""
        with self._free:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # A new session, so that signals reach the compilers' worker processes too.
                start_new_session=True,
                **given,
            )
            self._running.add(process)
        return process

    def handled(self, process: subprocess.Popen[str], record: dict[str, Any]) -> bool:
        """Return whether a line of the process was about turns, after doing what it asks."""
        if record == _ASKS:
            self._free.acquire()
            self._holder = process
            self._signal_others(signal.SIGSTOP)
            time.sleep(_DRAINING)
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        elif record == _RETURNS:
            self._release(process)
        return record in (_ASKS, _RETURNS)

    def end(self, process: subprocess.Popen[str]) -> None:
        """End a process and those that it has started."""
        _signal(process, signal.SIGKILL)
        process.wait()
        self._release(process)
        self._running.discard(process)

    def _release(self, process: subprocess.Popen[str]) -> None:
        if self._holder is process:
            self._signal_others(signal.SIGCONT)
            self._holder = None
            self._free.release()

    def _signal_others(self, number: signal.Signals) -> None:
        for other in self._running - {self._holder}:
            _signal(other, number)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)

"""Run each architecture in a process of its own, which may crash or hang."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.architectures.check import Outcome, check
from tests.device import VARIABLE


@dataclass(frozen=True)
class Entry:
    """One architecture to check, in one mode and dtype."""

    name: str
    mode: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}/{self.mode}/{self.dtype}"


def run_entries(
    entries: Sequence[Entry],
    record: Callable[[Outcome], None],
    *,
    workers: int = 1,
    timeout: float = 300.0,
    door: str = "dispatch",
) -> None:
    """Check ``entries``, and pass each outcome to ``record`` as soon as it is known.

    Args:
        entries: the entries to check.
        record: a function of an outcome, called from one thread at a time.
        workers: the number of processes at a time.
        timeout: seconds for one entry.
        door: the way to run compiled code, one of ``DOORS`` in ``check.py``.
    """
    # A forked process cannot use CUDA if its parent has initialized it.
    forked = os.environ.get(VARIABLE, "cpu") == "cpu"
    context = multiprocessing.get_context("forkserver" if forked else "spawn")
    if forked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        context.set_forkserver_preload(
            ["torch", "tvm", "transformers", "tests.architectures.check"]
        )
    waiting: queue.SimpleQueue[Entry] = queue.SimpleQueue()
    for entry in entries:
        waiting.put(entry)
    lock = threading.Lock()

    def serve() -> None:
        while True:
            try:
                entry = waiting.get_nowait()
            except queue.Empty:
                return
            outcome = _run(context, entry, timeout, door)
            with lock:
                record(outcome)

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run(context: Any, entry: Entry, timeout: float, door: str) -> Outcome:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(entry, door, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            return Outcome(**asdict(entry), result="timeout", reason=f"over {timeout:.0f} s")
        outcome: Outcome = ours.recv()
        return outcome
    except EOFError:
        process.join()
        return Outcome(**asdict(entry), result="crash", reason=f"exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _work(entry: Entry, door: str, connection: Connection) -> None:
    """Run in the child process: check ``entry`` and send the outcome through ``connection``."""
    import torch

    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    try:
        outcome = check(entry.name, entry.mode, entry.dtype, door)
    except Exception as error:
        last = "; ".join(
            f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}"
            for f in traceback.extract_tb(error.__traceback__)[-3:]
        )
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]} ({last})"
        outcome = Outcome(entry.name, entry.mode, entry.dtype, "error", text)
    connection.send(outcome)

"""Run each architecture in a process of its own, which may crash or hang."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from tests.architectures.check import Outcome, check
from tests.device import VARIABLE
from tests.processes import Died, in_threads, run_alone


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
    lock = threading.Lock()

    def serve(taken: Iterator[Entry]) -> None:
        for entry in taken:
            try:
                outcome = run_alone(context, _work, (entry, door), timeout)
            except Died as death:
                outcome = Outcome(**asdict(entry), result=death.result, reason=str(death))
            with lock:
                record(outcome)

    in_threads(entries, serve, workers)


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

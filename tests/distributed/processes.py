"""Functions run by several processes, one a rank, as a user's script would run them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, by the server that the processes are forked from.
_CONTEXT.set_forkserver_preload(["tests.distributed.preloaded"])
# What a process needs beside what it is tested with: to start, and to compile.
_SLACK = 200


@dataclass(frozen=True)
class Outcome:
    """What a rank returned, or the error that ended it (None for one that was killed)."""

    value: Any = None
    error: str | None = None
    kind: str = ""
    ended: bool = False


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Outcome]:
    """``function(rank, *args)`` in each of ``ranks`` processes; how each of them ended.

    The process group is the function's own affair; the variables that torchrun sets are set.
    """
    results = _CONTEXT.Queue()
    port = _free_port()
    processes = [
        _CONTEXT.Process(target=_run, args=(function, rank, ranks, port, results, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Outcome] = {}
    end = time.monotonic() + _SLACK
    while len(found) < ranks:
        try:
            rank, outcome = results.get(timeout=0.2)
            found[rank] = pickle.loads(outcome)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if rank not in found and process.exitcode not in (None, 0):
                    found[rank] = Outcome(ended=True)
            if time.monotonic() > end:
                break
    for process in processes:
        process.join(1)
        if process.is_alive():
            process.kill()
    assert len(found) == ranks, f"ranks {sorted(set(range(ranks)) - set(found))} hang"
    return [found[rank] for rank in range(ranks)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; an error of one fails the test."""
    errors = [o.error for o in outcomes if o.error is not None or o.ended]
    assert not errors, "\n".join(map(str, errors))
    return [o.value for o in outcomes]


def _run(
    function: Callable[..., Any], rank: int, ranks: int, port: int, results: Any, args: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TVMBRIDGE_CACHE="0")
    try:
        torch.manual_seed(0)
        outcome = Outcome(value=function(rank, *args))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(error=str(error), kind=type(error).__name__)
    # Bytes: a tensor in a queue is shared with its process, which ends.
    results.put((rank, pickle.dumps(outcome)))
    # As a script that ends by an error: its connections are closed.
    results.close()
    results.join_thread()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

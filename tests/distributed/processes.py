"""Run a function in several processes, one a rank, as torchrun runs a user's script."""

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
# The fork server imports this module once; test processes are forked from it.
_CONTEXT.set_forkserver_preload(["tests.distributed.preloaded"])
# Seconds for a process to start and to compile.
_SLACK = 200


@dataclass(frozen=True)
class Outcome:
    """The result of a rank.

    - ``value``: the function's value.
    - ``error``, ``kind``: the message and class name of the exception that it raised.
    - ``ended``: whether the process died without a result, such as by a signal.
    """

    value: Any = None
    error: str | None = None
    kind: str = ""
    ended: bool = False


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, on_gpus: bool = False
) -> list[Outcome]:
    """Run ``function(rank, *args)`` in each of ``ranks`` processes; return their outcomes.

    With ``on_gpus`` the processes are spawned: a process forked from one that has looked for
    GPUs cannot use CUDA.
    The environment has torchrun's variables; the function itself initializes the process group.
    """
    context = multiprocessing.get_context("spawn") if on_gpus else _CONTEXT
    results = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_run, args=(function, rank, ranks, port, results, args))
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
    """Return the values of the ranks; an error of any rank fails the test."""
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
    # Pickle to bytes: a tensor in a queue shares memory with its process, which is about to end.
    results.put((rank, pickle.dumps(outcome)))
    # Exit like a script that fails: its connections are closed at once.
    results.close()
    results.join_thread()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

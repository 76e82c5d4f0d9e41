"""Share entries among threads, and run functions in processes that may crash or hang."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Entry = TypeVar("Entry")
_END: Any = object()


class Died(Exception):
    """The process crashed or took too long: ``result`` is ``crash`` or ``timeout``."""

    def __init__(self, result: str, reason: str) -> None:
        super().__init__(reason)
        self.result = result


def add_shard(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--shard i/n``, whose value is a slice of the entries."""

    def every_nth(text: str) -> slice:
        first, step = map(int, text.split("/"))
        return slice(first, None, step)

    help_ = "i/n: every n-th entry, from the i-th"
    parser.add_argument("--shard", type=every_nth, default="0/1", help=help_)


def in_threads(
    entries: Iterable[Entry], serve: Callable[[Iterator[Entry]], None], workers: int
) -> None:
    """Call ``serve`` in ``workers`` threads, with iterators that share ``entries``."""
    waiting, lock = iter(entries), threading.Lock()

    def taken() -> Iterator[Entry]:
        while True:
            with lock:
                entry = next(waiting, _END)
            if entry is _END:
                return
            yield entry

    threads = [threading.Thread(target=serve, args=(taken(),)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_alone(context: Any, work: Callable[..., None], args: tuple[Any, ...], limit: float) -> Any:
    """Return what ``work(*args, connection)`` sends through the connection from its own process.

    Raises:
        Died: the process ended without sending, or took longer than ``limit`` seconds.
    """
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            raise Died("timeout", f"over {limit:.0f} s")
        return ours.recv()
    except EOFError:
        process.join()
        raise Died("crash", f"exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()

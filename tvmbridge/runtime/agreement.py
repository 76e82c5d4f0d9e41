"""Ranks of a process group that compile together: one measures, all decide alike.

With ``CompileOptions.compiler_collectives`` each compilation for a call is an event that all ranks
of the default process group reach. Rank 0 chooses kernels and compiles. The others capture the
graph, and receive the choices and the code. If a rank is refused, all ranks run the module's own
forward, since only the rank itself could change that. All messages go through the store of the
process group, where a rank waits for minutes without the watchdog of a collective.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from tvmbridge.cache import Kept
from tvmbridge.cache.store import MOST_BYTES, formatted, parse_file, received_from
from tvmbridge.core.errors import BridgeError, BuildError, first_line
from tvmbridge.core.torch_private import default_store
from tvmbridge.kernels.table import answered_by, surroundings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Seconds that the ranks wait for one that has not reached the compilation: its call may be another.
JOIN_SECONDS = 120.0
# Seconds that the ranks wait for a sign of one that compiles. It gives one every five seconds, but
# TVM may hold Python's lock for longer.
LOST_SECONDS = 180.0
_SIGN_SECONDS = 5.0
# Seconds until a value that the store has is here.
_STORE_SECONDS = 300.0
_POLL_SECONDS = 0.02
_LOG_SECONDS = 15.0
# A value of the store may have 8 MiB.
_CHUNK = 4 * 2**20
_MOST_CHUNKS = MOST_BYTES // _CHUNK
_REASON_LENGTH = 2000

# How many compilations with each label this process has begun.
_begun: Counter[str] = Counter()


def ranks_now() -> int:
    """Return the number of ranks of the default process group; 1 without a group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def decided_together(label: str, body: Callable[[], Result]) -> Result:
    """Return ``body()`` if it returns on every rank; all ranks call this in the same order.

    Raises:
        BuildError: another rank was refused; the message names it and its reason.
        Exception: ``body`` has raised it on this rank.
    """
    number = _begun[label]
    _begun[label] += 1
    name = hashlib.sha256(label.encode()).hexdigest()[:24]
    # Not imported with this module: a build of PyTorch may be without it.
    from torch.distributed.distributed_c10d import PrefixStore

    distributed = torch.distributed
    store = PrefixStore(f"tvmbridge/compile/{name}/{number}", default_store())
    return Event(store, distributed.get_rank(), distributed.get_world_size(), label).run(body)


class Event:
    """One compilation of all ranks; a :class:`~tvmbridge.cache.store.CodeSource` of code.

    Args:
        store: a store that all ranks share, without keys of another event.
    """

    def __init__(self, store: Any, rank: int, size: int, label: str) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.label = label
        # Whether this rank has waited for rank 0 in vain.
        self._first_is_lost = False
        # Whether the store has failed: its process has ended, or does not answer.
        self._store_fails = False
        self._given: list[str] = []
        self._surroundings = surroundings()

    def run(self, body: Callable[[], Result]) -> Result:
        """Run ``body``, and return its result unless another rank was refused.

        Raises:
            BuildError: another rank was refused.
            Exception: ``body`` has raised it.
        """
        try:
            with self._signs(), received_from(self), answered_by(self.answer):
                result = body()
        except BaseException as error:
            self._publish(first_line(error) or type(error).__name__)
            if isinstance(error, BridgeError):
                # This rank runs the module's own forward, and waits in its next exchange for a
                # rank that still compiles: better here, without the timeout of a collective.
                self._await_all()
                self._forget()
            raise
        self._publish("")
        self._await_all()
        self._forget()
        for rank in range(self.size):
            reason = self._asked(functools.partial(self._reason, rank), "")
            if reason:
                raise BuildError(
                    f"rank {rank} has no compiled code, and all ranks decide alike: {reason}"
                )
        return result

    @contextlib.contextmanager
    def _signs(self) -> Iterator[None]:
        """Count up within this context, so that other ranks see that this one is alive."""
        ended = threading.Event()

        def count() -> None:
            with contextlib.suppress(RuntimeError):  # the store has ended
                while not ended.wait(_SIGN_SECONDS):
                    self.store.add(f"begun/{self.rank}", 1)

        self._asked(lambda: self.store.add(f"begun/{self.rank}", 1), 0)
        thread = threading.Thread(target=count, name="tvmbridge compiles", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _publish(self, reason: str) -> None:
        """Report the end of this rank's compilation; ``reason`` is empty if it has code."""
        content = reason[:_REASON_LENGTH].encode(errors="replace")
        self._asked(lambda: self.store.set(f"outcome/{self.rank}", content), None)

    def _reason(self, rank: int) -> str:
        """Return why ``rank`` has no code; empty if it has code, or has not ended."""
        content = self._get(f"outcome/{rank}") if self._ended(rank) else b""
        return content.decode(errors="replace")

    # What rank 0 gives the others -----------------------------------------------------------------

    def answer(self, question: str, _: Sequence[str], decide: Callable[[], str]) -> str:
        """Return rank 0's answer; decide here on rank 0, or if it has no answer."""
        # A rank on another kind of machine decides for itself.
        where = f"{self._surroundings} {question}"
        key = f"choice/{hashlib.sha256(where.encode()).hexdigest()[:32]}"
        if self.rank:
            given = self._asked(lambda: self._get(key) if self._comes(key) else None, None)
            return decide() if given is None else given.decode(errors="replace")
        found = decide()
        self._asked(lambda: self.store.set(key, found.encode()), None)
        return found

    def received(self, digest: str) -> Kept | None:
        """Return rank 0's code with this key; None on rank 0, or if it has none."""
        if not self.rank:
            return None
        try:
            content = self._asked(lambda: self._content(f"code/{digest}"), None)
            if content is None:
                return None
            key, kept = parse_file(content)
            if key.digest != digest:
                raise ValueError("it is of another key")
        except (ValueError, RecursionError) as error:
            logger.warning("code from rank 0 is not used: %s", error)
            return None
        return kept

    def _content(self, name: str) -> bytes | None:
        """Return the chunks that :meth:`give` has stored under ``name``; None: rank 0 has none.

        Raises:
            ValueError: the number of chunks is none that :meth:`give` stores, or one is missing.
        """
        if not self._comes(name):
            return None
        count = self._get(name)
        if len(count) > 9 or not count.isdigit() or int(count) > _MOST_CHUNKS:
            raise ValueError("its number of chunks is damaged")
        keys = [f"{name}/{i}" for i in range(int(count))]
        if not all(map(self._has, keys)):
            raise ValueError("a chunk of it is missing")
        return b"".join(map(self._get, keys))

    def give(self, key: Any, kept: Kept) -> None:
        """Offer the code of rank 0 to the others."""
        if self.rank:
            return
        content, name = formatted(key, kept), f"code/{key.digest}"
        chunks = [content[i : i + _CHUNK] for i in range(0, len(content), _CHUNK)]
        if len(chunks) > _MOST_CHUNKS:
            return
        for i, chunk in enumerate(chunks):
            self._set(f"{name}/{i}", chunk)
        self._set(name, str(len(chunks)).encode())

    def _set(self, key: str, content: bytes) -> None:
        """Store a value that :meth:`_forget` removes."""
        self._given.append(key)
        self._asked(lambda: self.store.set(key, content), None)

    # The store ------------------------------------------------------------------------------------

    def _asked(self, ask: Callable[[], Result], otherwise: Result) -> Result:
        """Return ``ask()``; return ``otherwise`` if the store fails now, or has failed before."""
        if self._store_fails:
            return otherwise
        try:
            return ask()
        except RuntimeError as error:  # of all classes of stores; a timeout is one as well
            self._store_fails = True
            logger.warning(
                "%s: the store of the process group fails, so this rank decides alone: %s",
                self.label, first_line(error),
            )  # fmt: skip
            return otherwise

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _get(self, key: str) -> bytes:
        self.store.wait([key], timedelta(seconds=_STORE_SECONDS))
        return bytes(self.store.get(key))

    def _comes(self, key: str) -> bool:
        """Wait for a value of rank 0; return False if rank 0 ends without it, or does not come."""
        if not self._first_is_lost:
            self._first_is_lost = not self._awaited(
                lambda: [] if self._has(key) else self._missing([0])
            )
        return self._has(key)

    def _await_all(self) -> None:
        missing = functools.partial(self._missing, range(self.size))
        if not self._asked(lambda: self._awaited(missing), True):
            nobody: list[int] = []
            ranks = ", ".join(map(str, self._asked(missing, nobody)))
            logger.warning(
                "%s: the ranks %s do not compile it; this rank decides alone", self.label, ranks
            )

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._ended(rank)]

    def _ended(self, rank: int) -> bool:
        return self._has(f"outcome/{rank}")

    def _awaited(self, missing: Callable[[], list[int]]) -> bool:
        """Wait until ``missing()`` is empty; return False if those ranks give no sign."""
        start = logged = alive = time.monotonic()
        signs: list[int] = []
        while ranks := missing():
            seen = [self.store.add(f"begun/{rank}", 0) for rank in ranks]
            now = time.monotonic()
            if seen != signs:
                signs, alive = seen, now
            if now - alive > (LOST_SECONDS if any(seen) else JOIN_SECONDS):
                return False
            if now - logged > _LOG_SECONDS:
                logged = now
                names = ", ".join(map(str, ranks))
                state = "compiles" if any(seen) else "has not reached it"
                logger.warning(
                    "%s: waiting for rank %s for %.0f s, which %s",
                    self.label, names, now - start, state,
                )  # fmt: skip
            time.sleep(min(0.25, _POLL_SECONDS + (now - start) / 20))
        return True

    def _forget(self) -> None:
        """Remove the code from the store after all ranks have it."""
        unfinished = self._asked(lambda: self._missing(range(self.size)), [self.rank])
        for key in () if unfinished else self._given:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self.store.delete_key(key)
        self._given = []

"""The background: code is compiled in another process, while calls run the module's own forward.

A child process compiles and stores the code in the cache on disk (:mod:`.child`). The first call
after its end compiles in this process, and takes the slow parts from the cache. Only one child
compiles at a time.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from tvmbridge.cache.surroundings import unusable
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.runtime.child import Child, cannot_fork

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

COMPILING = Reason(Kind.COMPILING, "further calls are served once it is ready")
# Mode and flags; code for any size adds which range of sizes it is for.
Key: TypeAlias = tuple[Hashable, ...]


class UnderWayError(Exception):
    """There is no code yet: another process compiles it, or compiles other code first."""

    def __init__(self) -> None:
        super().__init__(COMPILING.text)


@dataclass(frozen=True)
class _Job:
    child: Child
    # Weak references, because these objects may hold the module.
    about: weakref.ref[object]
    sample: weakref.ref[object]


@dataclass
class _Turn:
    """The child that compiles now, one for all modules of the process; None: no child does."""

    child: Child | None = None
    process: int = field(default_factory=os.getpid)

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the child's end; return whether no child compiles now."""
        if self.child is not None and (self.process != os.getpid() or self.child.wait(seconds)):
            self.child = None
        return self.child is None


_turn = _Turn()


def child_compiles() -> bool:
    """Whether a child process compiles for this process now."""
    return _turn.child is not None and not _turn.wait(0.0)


class Background:
    """The compilations of one module in the background.

    Args:
        options: options of the compilation; ``budget`` says whether calls wait for it.
    """

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        # Seconds that a call waits for its code; None: calls compile in this process.
        self.budget = options.budget
        self._jobs: dict[tuple[int, Key], _Job] = {}
        self._process = os.getpid()
        self._logged: set[str] = set()
        self.__finalizer = weakref.finalize(self, _cancel, self._jobs, self._process)

    def run(
        self,
        what: str,
        about: object,
        key: Key,
        body: Callable[[], Result],
        sample: object = None,
    ) -> Result:
        """Compile by ``body``, first in a child process and then here with the warm cache.

        ``body`` runs here at once if there is no budget, or if a child process cannot compile.

        Args:
            about: an object that identifies the compilation together with ``key``.
            key: the mode and the flags that it compiles for, and what else identifies it.
            body: the compilation; it must create the same graphs in the child and here.
            sample: an object that identifies compilations which this one replaces, since its code
                serves their calls as well; they are ended. None: it replaces none.

        Raises:
            UnderWayError: the child has not finished, or another child compiles.
            BridgeError: the compilation in the child failed.
        """
        if self.budget is None:
            return body()
        until = time.monotonic() + self.budget
        job = self._jobs.get((id(about), key))
        if job is not None and job.about() is not about:  # the id was that of a deleted object
            job = None
        if job is None:
            refusal = self._refusal()
            if refusal is not None:
                self._tell(f"code is compiled at the call, not in the background: {refusal}")
                return body()
            self._end_lesser(sample, key)
            if not _turn.wait(self.budget):
                raise UnderWayError
            job = self._start(what, about, key, body, about if sample is None else sample)
            job.child.wait(max(0.0, until - time.monotonic()))
        if not job.child.wait(0.0):
            raise UnderWayError
        del self._jobs[id(about), key]
        seconds = time.monotonic() - job.child.started
        if job.child.error is not None:
            logger.info("failed, %.1f s: %s", seconds, job.child.error)
            raise job.child.error
        logger.info("%s in the background has ended, %.1f s after it began", what, seconds)
        return body()

    def wait(self, timeout: float | None) -> None:
        """Wait until all compilations of the module have ended.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            TimeoutError: a compilation did not end in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for job in self._of_now():
            while not job.child.wait(60.0 if until is None else max(0.0, until - time.monotonic())):
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"{job.child.what} has not ended within {timeout} s")

    def under_way(self) -> tuple[str, ...]:
        """Describe each compilation in progress, with its duration so far."""
        now = time.monotonic()
        return tuple(
            f"{job.child.what}, for {now - job.child.started:.0f} s"
            for job in self._of_now()
            if not job.child.wait(0.0)
        )

    def cancel(self) -> None:
        """Kill the compilations in progress."""
        _cancel(self._jobs, self._process)

    def _of_now(self) -> list[_Job]:
        return list(self._jobs.values()) if self._process == os.getpid() else []

    def _refusal(self) -> Reason | None:
        """Return why compilations cannot run in the background; None if they can."""
        if self._process != os.getpid():
            self._jobs, self._process = {}, os.getpid()
        return cannot_fork() or unusable(self.options.cache)

    def _end_lesser(self, sample: object, key: Key) -> None:
        """End compilations for one signature whose calls the code of ``key`` will serve as well."""
        of_one_signature = key[:2]
        for place, job in list(self._jobs.items()):
            if sample is not None and place[1] == of_one_signature and job.sample() is sample:
                if not job.child.wait(0.0):
                    job.child.end("code for more sizes takes its place")
                    logger.info("%s", job.child.error)
                del self._jobs[place]

    def _start(
        self, what: str, about: object, key: Key, body: Callable[[], object], sample: object
    ) -> _Job:
        child = Child(what, body)
        _turn.child, _turn.process = child, os.getpid()
        job = self._jobs[id(about), key] = _Job(child, weakref.ref(about), weakref.ref(sample))
        logger.info("%s in the background, by process %d", what, child.pid)
        return job

    def _tell(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.info("%s", text)


def _cancel(jobs: dict[tuple[int, Key], _Job], process: int) -> None:
    if process != os.getpid():
        return
    for job in jobs.values():
        if not job.child.wait(0.0):
            job.child.end("nobody waits for it any longer")
    jobs.clear()

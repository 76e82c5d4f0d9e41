"""The background: code is compiled in another process, while calls run the module's own forward.

A child compiles, and keeps the code in the cache on disk (:mod:`.child`). A call after its end goes
the same way again, and finds there what takes long. One child compiles at a time.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from tvmbridge.cache.surroundings import unusable
from tvmbridge.core.options import CompileOptions
from tvmbridge.pipeline import passes_are_observed
from tvmbridge.runtime.child import Child, cannot_fork
from tvmbridge.runtime.fallbacks import COMPILING

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class UnderWayError(Exception):
    """There is no code yet: it is compiled in another process, or will be after other code."""

    def __init__(self) -> None:
        super().__init__(COMPILING)


@dataclass(frozen=True)
class _Job:
    child: Child
    # Not held: it may hold the module.
    about: weakref.ref[object]
    sample: weakref.ref[object]


@dataclass
class _Turn:
    """Which child compiles at this time, of all modules of the process."""

    child: Child | None = None
    process: int = field(default_factory=os.getpid)

    def wait(self, seconds: float) -> bool:
        """Whether none does, for which this waits so long."""
        if self.child is not None and (self.process != os.getpid() or self.child.wait(seconds)):
            self.child = None
        return self.child is None


_turn = _Turn()


def child_compiles() -> bool:
    """Whether another process compiles for this one at this time."""
    return _turn.child is not None and not _turn.wait(0.0)


class Background:
    """Compilations of one module.

    Args:
        options: how it is compiled, and whether that may be in the background.
    """

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        # The seconds that a call waits for its code; None: as long as it takes.
        self.budget = options.budget
        self._jobs: dict[tuple[int, Hashable], _Job] = {}
        self._process = os.getpid()
        self._told: set[str] = set()
        self.__finalizer = weakref.finalize(self, _cancel, self._jobs, self._process)

    def run(
        self,
        what: str,
        about: object,
        key: Hashable,
        body: Callable[[], Result],
        sample: object = None,
    ) -> Result:
        """What ``body`` returns, which is called where it need not compile, or has to here.

        Args:
            what: is compiled, for people.
            about, key: tell compilations apart: an object, and more.
            body: compiles; run once in a child and once here, with the same graphs.
            sample: serves the calls of this one too: what was begun for fewer of them is ended.

        Raises:
            UnderWayError: it is being compiled, or has to wait for other code.
            BridgeError: it could not be compiled in the background.
        """
        if self.budget is None:
            return body()
        until = time.monotonic() + self.budget
        job = self._jobs.get((id(about), key))
        if job is not None and job.about() is not about:  # of one that is gone
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
        """Return when nothing is under way.

        Raises:
            TimeoutError: it did not end in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for job in self._of_now():
            while not job.child.wait(60.0 if until is None else max(0.0, until - time.monotonic())):
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"{job.child.what} has not ended within {timeout} s")

    def under_way(self) -> tuple[str, ...]:
        """What is being compiled, and for how long."""
        now = time.monotonic()
        return tuple(
            f"{job.child.what}, for {now - job.child.started:.0f} s"
            for job in self._of_now()
            if not job.child.wait(0.0)
        )

    def cancel(self) -> None:
        """End what is under way: nobody waits for it any longer."""
        _cancel(self._jobs, self._process)

    def _of_now(self) -> list[_Job]:
        return list(self._jobs.values()) if self._process == os.getpid() else []

    def _refusal(self) -> str | None:
        """Why compilations cannot be in the background; None: they can."""
        if self._process != os.getpid():
            self._jobs, self._process = {}, os.getpid()
        cannot = cannot_fork() or unusable(self.options.cache)
        return "passes are observed" if cannot is None and passes_are_observed() else cannot

    def _end_lesser(self, sample: object, key: Hashable) -> None:
        for place, job in list(self._jobs.items()):
            if sample is not None and place[1] == key and job.sample() is sample:
                if not job.child.wait(0.0):
                    job.child.end("code for more sizes takes its place")
                    logger.info("%s", job.child.error)
                del self._jobs[place]

    def _start(
        self, what: str, about: object, key: Hashable, body: Callable[[], object], sample: object
    ) -> _Job:
        child = Child(what, body)
        _turn.child, _turn.process = child, os.getpid()
        job = self._jobs[id(about), key] = _Job(child, weakref.ref(about), weakref.ref(sample))
        logger.info("%s in the background, by process %d", what, child.pid)
        return job

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.info("%s", text)


def _cancel(jobs: dict[tuple[int, Hashable], _Job], process: int) -> None:
    if process != os.getpid():
        return
    for job in jobs.values():
        if not job.child.wait(0.0):
            job.child.end("nobody waits for it any longer")
    jobs.clear()

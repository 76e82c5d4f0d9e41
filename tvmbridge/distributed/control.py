"""Communication between the ranks of a pipeline: presence, agreement, and failures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tvmbridge.core.errors import BridgeError, PipelineError, first_line
from tvmbridge.distributed.watch import Poller

# One number for each pipeline of a process: all ranks create their pipelines in the same order.
_numbers = itertools.count()
_POLL_SECONDS = 0.05
# Seconds that a rank whose connection broke waits for the reason that another rank may report.
_REASON_SECONDS = 2.0
_FAILED = "failed"
# Seconds that a failed rank stays, because the store may end with it: the others read its reason.
_LINGER_SECONDS = 0.6
# PyTorch ends a process whose GPU waits longer than the group's timeout; this rank gives up before.
_WATCHDOG_TIMEOUTS = 3


def has_nccl() -> bool:
    """Whether NCCL sends the tensors on GPUs; a group may have a backend for each device type."""
    return "nccl" in str(dist.get_backend_config())


class Control:
    """The ranks of one pipeline: collectives on small objects, with errors that name ranks.

    Args:
        timeout: seconds that a rank waits for another.
        describe: returns the name of a rank with its stages, for errors.

    Raises:
        PipelineError: a rank did not come within the timeout.
    """

    def __init__(self, timeout: float) -> None:
        world = dist.group.WORLD
        if world is None:
            raise PipelineError("there is no process group; start the script by torchrun")
        self.timeout = timeout
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.describe: Callable[[int], str] = lambda rank: f"rank {rank}"
        self.failure: str | None = None
        self._store = PrefixStore(f"tvmbridge-{next(_numbers)}", world.get_group_store())
        self._calls = itertools.count()
        self._noted: str | None = None
        self._groups: list[Any] = []
        # Aborting a group ends the GPU's work that waits for a failed rank.
        self._abortable: list[Any] = []
        self._closed = False
        self._launched_at: float | None = None
        self._is_stuck = False
        # This thread may be waiting for a rank that has failed.
        self._watch = Poller(self._watched) if self.size > 1 else None
        self.call_roll("to build the pipeline")
        delta = timedelta(seconds=timeout)
        #: The group that sends Python objects, on the CPU whatever the devices are.
        self.group: Any = dist.new_group(backend="gloo", timeout=delta)
        self._groups.append(self.group)
        #: The group that sends the tensors that cross the cuts.
        self.data_group: Any = self.new_group(list(range(self.size)))

    def new_group(self, ranks: list[int]) -> Any:
        """Create a group for tensors of the devices; all ranks call it together."""
        on_gpus = has_nccl()
        seconds = self.timeout * (_WATCHDOG_TIMEOUTS if on_gpus else 1)
        group = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
        if self.rank in ranks:
            self._groups.append(group)
            if on_gpus:
                self._abortable.append(group)
        return group

    def close(self) -> None:
        """Free the groups: their connections, threads, and memory on GPUs; all ranks call it."""
        if self._closed:
            return
        try:
            if self.failure is None:
                self._leave()
        finally:
            self._closed = True
            if self._watch is not None:
                self._watch.end()
            self._abortable.clear()
            while self._groups:
                group = self._groups.pop()
                if dist.is_initialized():
                    dist.destroy_process_group(group)

    def _leave(self) -> None:
        """Wait until no rank uses a connection; the rank that may keep the store leaves last."""
        self.call_roll("to close the pipeline")
        keys = [f"left/{rank}" for rank in range(1, self.size)]
        if self.rank:
            self._store.set(keys[self.rank - 1], "left")
        end = time.monotonic() + self.timeout
        while not self.rank and not self._store.check(keys) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def require_open(self) -> None:
        """Raise if the pipeline can run no more steps."""
        if self.failure is not None:
            raise PipelineError(f"the pipeline has failed before: {self.failure}")
        if self._closed:
            raise PipelineError("the pipeline is closed")

    def connect(self, device: torch.device) -> None:
        """Connect the GPUs of all ranks, which NCCL otherwise does at the first use of a group.

        Within a step the connections would be made one after the other, while ranks already wait.
        """
        with self.guarded(lambda: f"waited for the GPUs of {self._others()}"):
            for group in self._abortable:
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def abort(self) -> None:
        """End the work on this rank's GPU that waits for another rank; discard its results."""
        for group in self._abortable:
            group.abort()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Let the watching thread abort kernel launches that are stuck inside this context.

        A GPU that waits for a lost rank accepts some more work before launches block as well. A
        launch is stuck when the timeout passes between two calls of :meth:`launches`.
        """
        self.launches()
        try:
            yield
        finally:
            self._launched_at = None

    def launches(self) -> None:
        """Record that work is launched on the GPU now."""
        self._launched_at = time.monotonic()

    def wait_for(self, device: torch.device) -> None:
        """Wait for a GPU, at most as long as the timeout.

        Raises:
            PipelineError: another rank has failed, so data received from it may be anything.
            TimeoutError: the GPU has not finished.
        """
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            end = time.monotonic() + self.timeout
            while not event.query():
                if time.monotonic() > end:
                    self.abort()
                    raise TimeoutError("the GPU has not finished the step")
                time.sleep(0)
        if self._noted is not None:
            raise PipelineError(f"{self.describe(self.rank)} stopped, because {self._noted}")
        if self._is_stuck:
            raise TimeoutError("the GPU took no more work")

    def call_roll(self, purpose: str) -> None:
        """Wait until every rank is here."""
        call = next(self._calls)
        keys = [f"roll{call}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], "here")
            end = time.monotonic() + self.timeout
            while not self._store.check(keys):
                reason = self.reason()
                if reason is not None:
                    raise self.failed(f"stopped, because {reason}")
                if time.monotonic() > end:
                    absent = [r for r, key in enumerate(keys) if not self._store.check([key])]
                    names = ", ".join(map(self.describe, absent))
                    raise self.failed(f"{names} did not come within {self.timeout:g} s {purpose}")
                time.sleep(_POLL_SECONDS)
        except BridgeError:
            raise
        except RuntimeError as error:
            raise self._lost_store(error) from error

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks."""
        with self.guarded(lambda: f"waited for {self._others()} {purpose}"):
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, value, group=self.group)
        return found

    def _others(self) -> str:
        return " and ".join(self.describe(r) for r in range(self.size) if r != self.rank)

    def share(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank ``source`` on every rank."""
        with self.guarded(lambda: f"waited for {self.describe(source)}"):
            found = [value]
            dist.broadcast_object_list(found, src=source, group=self.group)
        return found[0]

    def agree(self, error: BaseException | None, purpose: str) -> None:
        """Raise on every rank if one of them has an error."""
        told = None if error is None else f"{self.describe(self.rank)}: {first_line(error)}"
        for text in self.gather(told, "to hear how they fared"):
            if text is not None:
                raise PipelineError(f"{purpose}: {text}") from error

    @contextmanager
    def guarded(self, waiting: Callable[[], str]) -> Iterator[None]:
        """Turn any exception into a :class:`PipelineError`, and report it to the other ranks.

        ``waiting`` returns what this rank waited for, in case another rank is at fault.
        """
        self.require_open()
        try:
            yield
        except BridgeError as error:
            self.failed(str(error))
            raise
        except Exception as error:
            reason = self.reason(_REASON_SECONDS)
            if reason is not None:
                self.failure = reason
                raise PipelineError(
                    f"{self.describe(self.rank)} stopped, because {reason}"
                ) from error
            raise self.failed(
                f"{self.describe(self.rank)} {waiting()}, which did not come within "
                f"{self.timeout:g} s or has ended: {first_line(error)}"
            ) from error

    def _watched(self) -> bool:
        self._end_stuck()
        return self._look()

    def _look(self) -> bool:
        """Read the reason of a failure if there is one; return whether to stop looking."""
        try:
            if not self._store.check([_FAILED]):
                return False
            self._noted = bytes(self._store.get(_FAILED)).decode()
        except RuntimeError:
            return True
        self.abort()
        return True

    def _end_stuck(self) -> None:
        begun = self._launched_at
        if self._abortable and begun is not None and time.monotonic() - begun > self.timeout:
            self._launched_at, self._is_stuck = None, True
            self.abort()

    def failed(self, text: str) -> PipelineError:
        """Report a failure to the other ranks, and return the error to raise."""
        self.failure = text
        try:
            if not self._store.check([_FAILED]):
                self._store.set(_FAILED, text)
                if self.size > 1:
                    time.sleep(_LINGER_SECONDS)
        except RuntimeError:
            pass  # The rank that keeps the store is gone; the other ranks notice that as well.
        return PipelineError(text)

    def reason(self, wait: float = 0.0) -> str | None:
        """Return what another rank reported of its failure; wait up to ``wait`` seconds for it."""
        end = time.monotonic() + wait
        while self._noted is None and not self._look() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return self._noted

    def _lost_store(self, error: RuntimeError) -> PipelineError:
        return self.failed(
            f"{self.describe(0)}, which keeps the store, has ended: {first_line(error)}"
        )

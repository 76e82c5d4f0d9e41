"""Executors: what a dispatcher calls to serve a call by other code than the module's forward.

All executors of the process drop their fast paths at a fork, and are summed up at exit.
"""

from __future__ import annotations

import atexit
import os
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.reasons import Reason
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.fallbacks import Tally, forget_summaries
from tvmbridge.runtime.guards.forwards import original_forward
from tvmbridge.runtime.specialization import USES, Specialization
from tvmbridge.runtime.timed_path import AsidePath, ServingPath, TimedPath

# The most fast guards that a call checks before the full guards.
_MOST_FAST = 4


class Served(NamedTuple):
    """The return value of a call that an executor has served."""

    results: Any


class FastPaths:
    """The paths whose fast guards a call checks before the full guards, the last used one first.

    - ``known``: the paths, each with the specialisation that it belongs to.
    - ``asides``: objects of native code that pass calls to the module's own forward. Native code
      checks them before all ``known``, and keeps the list.
    - ``process``: the process that the code was loaded in.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.known: tuple[tuple[ServingPath, Specialization], ...] = ()
        self.asides: list[Any] = []
        self._passed_on: list[Any] = []

    def put_first(self, path: ServingPath, specialization: Specialization) -> None:
        """Check ``path`` first from now on."""
        others = [known for known in self.known if known[0].code is not path.code]
        self.known = ((path, specialization), *others[: _MOST_FAST - 1])
        self.find_asides()
        specialization.put_first(path.code)

    def find_asides(self) -> None:
        """Update ``asides`` after a change of the paths."""
        paths = (path for path, _ in self.known)
        found = [p.native for p in paths if isinstance(p, AsidePath) and p.native is not None]
        if found or self.asides or self._passed_on:
            self.asides[:] = [*found, *self._passed_on]

    def pass_on(self, native: Any) -> None:
        """Have calls that ``native`` accepts passed to the module's own forward from now on."""
        self._passed_on = [native, *self._passed_on[: _MOST_FAST - 1]]
        self.find_asides()

    def note_uses(self) -> None:
        """Note which specialisations native code has used since the last call of this method."""
        for path, specialization in reversed(self.known):
            if isinstance(path, AsidePath) and path.was_used():
                specialization.last_use = next(USES)

    def end_timing(self, code: CompiledEntry) -> None:
        """Keep the fast path of ``code`` that a trial has timed, without its timing.

        It may have captured CUDA graphs. A new path would capture them again in memory of its own.
        """
        self.known = tuple(
            (p.path if isinstance(p, TimedPath) and p.code is code else p, specialization)
            for p, specialization in self.known
        )

    def forget(self) -> None:
        """Drop the fast paths, so that the full guards check the next call."""
        self.known, self._passed_on = (), []
        self.find_asides()


class Executor(ABC):
    """Serves calls of one module, in place of the module's own forward.

    - ``paths``: the fast paths, which the dispatcher checks.
    - ``packing``: a context in which calls run.
    - ``removal``: the name of the public function that removes the dispatch, for messages.

    Args:
        own: the forward that was set on the instance; None if it has only that of its class.
    """

    removal: ClassVar[str]

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, tally: Tally) -> None:
        self.module = module
        self.own = own
        self.tally = tally
        self.paths = FastPaths()
        self.packing: AbstractContextManager[Any] = nullcontext()
        _executors.add(self)

    @property
    def original(self) -> Callable[..., Any]:
        """Return the module's own forward: the instance's, or the one its class has now."""
        return original_forward(self.module, self.own)

    def run_own(self, arguments: Arguments) -> Any:
        """Run the module's own forward and return its results."""
        args, kwargs = arguments
        of_class = type(self.module).__dict__.get("forward")
        if self.own is None and type(of_class) is types.FunctionType:  # the common case, faster
            return of_class(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)

    @abstractmethod
    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Served | Reason:
        """Serve a call that no fast guard has accepted; return the reason if that is impossible."""

    @abstractmethod
    def renewed(
        self, module: nn.Module, own: Callable[..., Any] | None, memo: Mapping[int, Any]
    ) -> Executor:
        """Return an executor for ``module``, a deep copy; ``memo`` is the memo of the copying."""

    @abstractmethod
    def served(self) -> int:
        """Return the number of calls that were served so far."""

    def own_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of a call as the module's own forward takes them."""
        return args, kwargs

    def fell_back(self, reason: Reason, arguments: Arguments) -> None:  # noqa: B027
        """Note that the module's own forward has served a call, because of ``reason``."""

    def __del__(self) -> None:
        self.sum_up()

    def sum_up(self) -> None:
        """Keep a summary of the calls, which is logged at the end of the process."""
        tally = self.__dict__.get("tally")  # None if __init__ has raised
        if tally is not None and tally.to_be_summed_up and self.paths.process == os.getpid():
            tally.keep_summary(self.served())


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def _forget_after_fork() -> None:
    # The threads that compiled code runs on do not exist in the new process.
    for executor in list(_executors):
        executor.paths.forget()
    forget_summaries()


@atexit.register
def _keep_summaries() -> None:
    """Keep the summaries of all executors that are alive at exit.

    Functions registered with :mod:`atexit` run in reverse order, so this one runs before
    :func:`~.fallbacks.log_summaries`.
    """
    for executor in list(_executors):
        executor.sum_up()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)

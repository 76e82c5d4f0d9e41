"""Paths of entries with a speed trial: one times the calls, one runs the module's own forward.

Both have the interface of a :class:`~.fast_path.FastPath`, which replaces them if compiled code
wins. Calls after the trial then run the same instructions as calls without a trial.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.profiling import profiling
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.fast_path import FastPath
from tvmbridge.runtime.guards.arguments import ArgumentsGuard
from tvmbridge.runtime.guards.forwards import original_forward
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.speed_trial import SpeedTrial


class ServingPath(Protocol):
    """A path that a dispatcher tries before the full guards.

    - ``guard``: its ``check`` returns the leaves of a call that it accepts; otherwise None.
    - ``entry``: its ``run_fast`` serves the call, given these leaves.
    - ``code``: the compiled entry whose calls the path serves.
    - ``direct``: a function that only runs compiled code; None if calls need more.
    """

    @property
    def guard(self) -> Any: ...
    @property
    def entry(self) -> Any: ...
    @property
    def code(self) -> CompiledEntry: ...
    @property
    def direct(self) -> Callable[[Sequence[Any]], Any] | None: ...


class _Checked(NamedTuple):
    """The leaves of a call that a fast guard has accepted, and the seconds that the guard took."""

    leaves: Sequence[Any]
    seconds: float


class _Path:
    """The base of both paths; an instance is the ``guard`` and the ``entry`` of its own path.

    Args:
        code: the compiled entry whose calls the path serves.
        module: the dispatched module.
        own: the forward that was set on the instance; None if it has only that of its class.
    """

    direct = None

    def __init__(
        self, code: CompiledEntry, module: nn.Module, own: Callable[..., Any] | None
    ) -> None:
        self.code = code
        self.module = module
        self.own = own
        self.guard = self.entry = self

    def run_own(self, arguments: Arguments) -> Any:
        """Run the module's own forward and return its results."""
        args, kwargs = arguments
        of_class = type(self.module).forward
        if self.own is None and type(of_class) is types.FunctionType:  # the common case, faster
            return of_class(self.module, *args, **kwargs)
        return original_forward(self.module, self.own)(*args, **kwargs)


class TimedPath(_Path):
    """Times the calls that a fast path accepts, while the speed trial of its entry lasts.

    Args:
        path: the fast path of the entry.
        trial: the speed trial, which decides who serves each call.
        module: the dispatched module.
        own: the forward that was set on the instance; None if it has only that of its class.
    """

    def __init__(
        self,
        path: FastPath[CompiledEntry],
        trial: SpeedTrial,
        module: nn.Module,
        own: Callable[..., Any] | None,
    ) -> None:
        super().__init__(path.entry, module, own)
        self.path = path
        self.trial = trial

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Checked | None:
        """Return the leaves of a call that the guard accepts, with the guard's time; or None."""
        return self._checked(self.path.guard.check, args, kwargs)

    def check_under_dynamo(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Checked | None:
        """Return the same for a call by TorchDynamo, which has checked PyTorch's modes."""
        return self._checked(self.path.guard.check_under_dynamo, args, kwargs)

    def _checked(
        self, check: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Checked | None:
        if self.trial.verdict is not None:
            return None
        started = time.perf_counter()
        leaves = check(args, kwargs)
        return None if leaves is None else _Checked(leaves, time.perf_counter() - started)

    def run_fast(self, _: Any, checked: _Checked, arguments: Arguments) -> Any:
        """Serve a call by compiled code or by the module's own forward."""
        code = partial(self._run_code, checked.leaves, arguments)
        return self.trial.serve(code, partial(self.run_own, arguments), checked.seconds)

    def _run_code(self, leaves: Sequence[Any], arguments: Arguments) -> Any:
        direct = self.path.direct
        if direct is not None and not profiling():
            return direct(leaves)
        return self.code.run_fast(self.path, leaves, arguments)


class AsidePath(_Path):
    """Serves calls by the module's own forward, which the speed trial has found to be faster.

    Args:
        code: the entry whose calls are served.
        trial: the speed trial, which counts the calls.
        module: the dispatched module.
        own: the forward that was set on the instance; None if it has only that of its class.
        signature: the signature of the arguments.
        leaves: the leaves of a call's arguments.
    """

    def __init__(
        self,
        code: CompiledEntry,
        trial: SpeedTrial,
        module: nn.Module,
        own: Callable[..., Any] | None,
        signature: Signature,
        leaves: Sequence[Any],
    ) -> None:
        super().__init__(code, module, own)
        self.trial = trial
        guard = ArgumentsGuard(module, signature, leaves, code.training is not None)
        self.check = guard.check
        self.check_under_dynamo = guard.check_under_dynamo

    def run_fast(self, _: Any, __: Any, arguments: Arguments) -> Any:
        """Serve a call by the module's own forward."""
        self.trial.aside_calls += 1
        return self.run_own(arguments)

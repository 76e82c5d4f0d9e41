"""What takes the place of a fast path: while calls are timed, and after the code has stepped aside.

A dispatcher asks both as it asks a :class:`~.fast_path.FastPath`, so that calls which compiled code
serves after its trial run the same instructions as without one.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import nn

from tvmbridge.core.profiling import profiling
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.fast_path import FastPath
from tvmbridge.runtime.guards.arguments import ArgumentsGuard
from tvmbridge.runtime.guards.forwards import original_forward
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.speed_trial import SpeedTrial


class ServingPath(Protocol):
    """What a dispatcher asks before the full guards.

    guard: ``check`` returns what ``entry.run_fast`` takes as the leaves of a call, or None.
    code: the compiled entry whose calls it serves.
    direct: serves calls that are a call of compiled code alone, or None.
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
    """A call that a fast guard let pass, and the seconds that the guard took."""

    leaves: Sequence[Any]
    seconds: float


class _Path:
    """A path that is its own guard and entry, for a module and the forward of its instance."""

    direct = None

    def __init__(
        self, code: CompiledEntry, module: nn.Module, own: Callable[..., Any] | None
    ) -> None:
        self.code = code
        self.module = module
        self.own = own
        self.guard = self.entry = self

    def run_own(self, arguments: Arguments) -> Any:
        """The results of the module's own forward."""
        args, kwargs = arguments
        of_class = type(self.module).forward
        if self.own is None and type(of_class) is types.FunctionType:  # the common case, faster
            return of_class(self.module, *args, **kwargs)
        return original_forward(self.module, self.own)(*args, **kwargs)


class TimedPath(_Path):
    """Times calls that ``path`` may serve, for the ``trial`` of its entry."""

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
        """The leaves of a call that compiled code may serve."""
        return self._checked(self.path.guard.check, args, kwargs)

    def check_under_dynamo(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Checked | None:
        """The same for calls by TorchDynamo."""
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
    """Calls the module's own forward, which is faster than the ``code`` of an entry.

    Args:
        code: its calls.
        trial: counts them.
        module, own: as of the path.
        signature: of the arguments of a call.
        leaves: of the call.
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

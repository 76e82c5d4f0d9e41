"""Paths of entries with a speed trial: one times the calls, one runs the module's own forward.

Both have the interface of a :class:`~.fast_path.FastPath`, which replaces them if compiled code
wins. Calls after the trial then run the same instructions as calls without a trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.generated import Scope
from tvmbridge.core.profiling import profiling
from tvmbridge.core.torch_private import GlobalStateGuard, saved_tensors_hooks_in_force
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.fast_path import FastPath
from tvmbridge.runtime.guards.fast import FastGuard, generated_guard
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.native_aside import native_aside
from tvmbridge.runtime.speed_trial import SpeedTrial


class ArgumentsGuard(FastGuard):
    """Accepts calls with the same kind of arguments and the same PyTorch modes as one call.

    It does not compare the module's tensors and attributes, because the module's own forward is
    right for any of them.

    Args:
        records: whether autograd records the call; then calls inside a checkpoint are refused.
    """

    def __init__(
        self, module: nn.Module, signature: Signature, leaves: Sequence[Any], records: bool
    ) -> None:
        self._lines: list[str] = []
        self._scope = Scope(
            {
                "attributes": module.__dict__,
                "flatten": signature.leaves_of,
                "same_state": GlobalStateGuard().check,
                "saved_hooks": saved_tensors_hooks_in_force,
            }
        )
        self._refuse_if(f"attributes['training'] is not {module.training}")
        self._emit_arguments(signature)
        self._emit_constants(signature.constants)
        self._emit_numbers(signature)
        self._emit_tensors(signature, leaves)
        self._refuse_if("not same_state()")
        if records:
            self._refuse_if("saved_hooks(True) is not None")
        self.source, self.check = generated_guard(self._lines, self._scope)
        self.check_under_dynamo = self.check


RunOwn: TypeAlias = Callable[[Arguments], Any]


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
    """The base of both paths; an instance is the ``guard`` and the ``entry`` of its own path."""

    direct = None

    def __init__(self, code: CompiledEntry, trial: SpeedTrial, run_own: RunOwn) -> None:
        self.code = code
        self.trial = trial
        self.run_own = run_own
        self.guard = self.entry = self


class TimedPath(_Path):
    """Times the calls that ``path``, a fast path, accepts, while the speed trial lasts."""

    def __init__(self, path: FastPath[CompiledEntry], trial: SpeedTrial, run_own: RunOwn) -> None:
        super().__init__(path.entry, trial, run_own)
        self.path = path

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

    ``signature`` and ``leaves`` are those of a call; see :class:`_Path`.

    - ``native``: the same in native code, which serves equal calls; None if there is none.
    """

    def __init__(
        self,
        code: CompiledEntry,
        trial: SpeedTrial,
        run_own: RunOwn,
        signature: Signature,
        leaves: Sequence[Any],
    ) -> None:
        super().__init__(code, trial, run_own)
        self._records = code.training is not None
        guard = ArgumentsGuard(code.state.module, signature, leaves, self._records)
        self.check = guard.check
        self.check_under_dynamo = guard.check_under_dynamo
        self.native: Any = None
        self._seen = 0  # calls of ``native`` that ``was_used`` has seen

    def make_native(self, own: Callable[..., Any] | None, arguments: Arguments) -> None:
        """Let native code serve calls like one with these arguments; see :func:`native_aside`."""
        if self.trial.passed_on.has_room:
            self.native = native_aside(self.code.state.module, own, arguments, self._records)
        if self.native is not None:
            self.trial.passed_on.add(self.native)

    def was_used(self) -> bool:
        """Whether native code has served a call since the last call of this method."""
        calls = 0 if self.native is None else self.native.calls
        used, self._seen = calls > self._seen, calls
        return used

    def run_fast(self, _: Any, __: Any, arguments: Arguments) -> Any:
        """Serve a call by the module's own forward."""
        self.trial.count_aside()
        return self.run_own(arguments)

"""The dispatcher: the forward of a dispatched module, which chooses TVM or the original."""

from __future__ import annotations

import functools
import os
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.graph_capture.surroundings import in_checkpoint, refused_now
from tvmbridge.graph_capture.trace.standins import NO_ATTRIBUTE, STAND_IN
from tvmbridge.runtime.background import COMPILING
from tvmbridge.runtime.checks import Checks
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.fallbacks import Tally
from tvmbridge.runtime.guards.forwards import (
    StandsForForward,
    calling_module,
    forward_of_class,
    pickled_forward,
    rebound,
    references_of_a_call,
)
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.runtime.guards.signature import (
    Matched,
    has_plain_names,
    nearest,
    with_plain_names,
)
from tvmbridge.runtime.in_process import register
from tvmbridge.runtime.module_code import ModuleCode
from tvmbridge.runtime.pinning import renewed_path
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.runtime.speed_trial import SpeedTrial, only_if_faster_now
from tvmbridge.runtime.timed_path import AsidePath, ServingPath, TimedPath

# The most fast guards that a call checks before the full guards.
_MOST_FAST = 4
# References to a dispatcher during a call, if no copy of the module holds the dispatcher too.
_ALONE = references_of_a_call()


class _Served(NamedTuple):
    """The return value of a call that compiled code has served."""

    results: Any


class _Unserved(NamedTuple):
    """Why compiled code has not served a call.

    - ``reason``: what differs; None: nothing was compiled for the arguments.
    - ``outgrown``: the entry that does not fit, because the module may have changed; or None.
    """

    reason: Reason | None = None
    outgrown: CompiledEntry | None = None


class Dispatcher(ModuleCode, StandsForForward):
    """The forward of a dispatched module.

    It is installed as ``forward`` in the module's ``__dict__``; dispatch changes nothing else in
    the module. A deep copy of the module has its own dispatcher, with the same code and counters
    at zero. An unpickled module has no dispatcher, since compiled code is not pickled.

    Args:
        module: the dispatched module.
        own: the forward that was set on the instance; None if it has only that of its class.
        target: the TVM target; None is this machine's CPU.
        options: options of the compilation.
        on_fallback: see :class:`~.fallbacks.Tally`.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any] | None,
        target: Any,
        options: CompileOptions,
        on_fallback: str = "warn",
    ) -> None:
        super().__init__(module, own, target, options)
        self.tally = Tally(self._name(), on_fallback)
        self.checker: Checks | None = None
        # The module's own forward would not keep to a memory budget.
        unlimited = options.memory_budget is None
        self.times_calls = unlimited and only_if_faster_now(options.only_if_faster)
        register(self)
        self._outside_of_graphs = _outside_of_graphs()
        functools.update_wrapper(self, self.original)

    def __getattr__(self, name: str) -> Any:
        if name == "__func__" and sys._getframe(1).f_globals["__name__"].startswith("torch.jit"):
            raise BridgeError(
                f"torch.jit.script cannot read the forward of a dispatched {self._name()}: call "
                "remove_tvm_dispatch on it first, or script it before it is dispatched"
            )
        # Code that inspects functions (__code__, __defaults__, __globals__) sees the module's own
        # forward. Without __func__, accelerate's prepare wraps the dispatcher itself.
        if (
            name.startswith("__")
            and name not in ("__func__", "__self__")
            and "module" in self.__dict__
        ):
            return getattr(self.original, name)
        raise AttributeError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._outside_of_graphs(self, args, kwargs)
        known = self.fast_paths
        for fast, specialization in known:
            leaves = fast.guard.check(args, kwargs)
            if leaves is not None:
                if sys.getrefcount(self) > _ALONE and self._is_of_copy(sys._getframe(1)):
                    break
                specialization.last_use = next(self._uses)
                if fast is not known[0][0]:
                    self._ask_first(fast, specialization)
                return fast.entry.run_fast(fast, leaves, (args, kwargs))
        caller = calling_module(sys._getframe(1))
        if caller is not None and caller is not self.module:
            return self._serve_copy(caller, args, kwargs)
        reason = refused_now()
        if reason is not None:
            return self._fall_back(reason, args, kwargs)
        if not has_plain_names(kwargs):
            named = with_plain_names(kwargs, self.original)
            if named is None:
                return self._fall_back(Reason(Kind.KEYWORD), args, kwargs)
            kwargs = named
        with self.packing:
            return self._call(args, kwargs)

    def _is_of_copy(self, frame: types.FrameType) -> bool:
        return calling_module(frame) not in (None, self.module)

    def _serve_copy(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the own forward of a shallow copy, whose attributes may differ from this module's."""
        self.tally.note(Reason(Kind.COPY))
        own = self.own or forward_of_class(module)
        return own(*args, **kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool = False) -> Any:
        if self.cut.why is not None and not any(s.compiled() for s in self.all_specializations()):
            return self._run_in_parts(args, kwargs)
        started = time.perf_counter()
        known, unserved = self.specializations, _Unserved()
        misfits: list[Reason] = []
        lacking: list[tuple[Specialization, Mode, Matched]] = []
        for specialization in self._candidates(known, misfits, args, kwargs):
            matched = specialization.signature.match(args, kwargs)
            if isinstance(matched, Reason):
                misfits.append(matched)
                continue
            mode = self._mode(specialization, matched.leaves)
            if isinstance(mode, Reason):
                return self._fall_back(mode, args, kwargs)
            entry = specialization.chosen(mode, matched.leaves)
            if entry is None:
                lacking.append((specialization, mode, matched))
                continue
            served = self._serve(specialization, mode, entry, matched, started)
            if isinstance(served, _Served):
                return served.results
            unserved = served
        for specialization, mode, matched in lacking[:1]:
            found = self._compiled(specialization, mode, matched, f"the first in mode {mode}")
            if isinstance(found, Reason):
                if found is not COMPILING and (self.cut.why or self._cut_for_any_size(found.text)):
                    return self._run_in_parts(args, kwargs)
                return self._fall_back(found, args, kwargs)
            served = self._serve(specialization, mode, found, matched, started)
            if isinstance(served, _Served):
                return served.results
            unserved = served
        if self.cut.why is not None:
            return self._run_in_parts(args, kwargs)
        why = unserved.reason or nearest(misfits)
        if why is not None and unserved.reason is None and not again:
            added = self._take_numbers(known, args, kwargs, why)
            if isinstance(added, Reason):
                return self._fall_back(added, args, kwargs)
            if added:
                return self._call(args, kwargs, again=True)
            why = self.numbers.explained(why)
        may_add = self.compiles_signatures and not again
        if may_add and self.room.is_left(unserved.outgrown, unserved.reason, misfits):
            refused = self._specialize(known, args, kwargs, why)
            if refused is None:
                return self._call(args, kwargs, again=True)
            why = refused
        other = next((m for m in misfits if m.kind is Kind.SHAPE), None)
        if other is not None and self._cut_for_any_size(other.text):
            return self._run_in_parts(args, kwargs)
        if may_add and self._turn_to_any_size(misfits):
            return self._call(args, kwargs, again=True)
        without = Kind.FROZEN_COPY if self.options.freeze else Kind.NOT_COMPILED
        return self._fall_back(why or Reason(without), args, kwargs)

    def _run_in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call by the compiled parts of the module, with eager PyTorch between them."""
        reason = self.cut.refusal(args, kwargs)
        if reason is not None:
            return self._fall_back(reason, args, kwargs)
        results, unserved = self.cut.run(self.original, args, kwargs)
        if unserved is not None:
            self.tally.note(unserved)
        if self._failed is not None:
            self._retry_if_settled()
        return results

    def _serve(
        self,
        specialization: Specialization,
        mode: Mode,
        entry: CompiledEntry,
        matched: Matched,
        started: float,
    ) -> _Served | _Unserved:
        """Serve a call by ``entry``, or by code that is compiled in its place.

        ``started`` is the ``time.perf_counter()`` at which the guards of the call began.
        """
        leaves, arguments = matched
        tensors = entry.state.tensors()
        reason = entry.mismatch(leaves, tensors)
        settling = reason is not None and entry.awaits_first()
        if reason is not None:
            instead = self._instead(specialization, mode, entry, matched)
            if isinstance(instead, Reason):
                return _Unserved(replace(instead, settles=settling))
            if instead is not None:
                entry, tensors = instead, instead.state.tensors()
                reason = entry.mismatch(leaves, tensors)
        if reason is not None:
            return _Unserved(replace(reason, settles=settling), None if settling else entry)
        specialization.last_use = next(self._uses)
        if self.checker is not None:
            return _Served(self.checker.run(self.module, entry, leaves, tensors, arguments))
        run, trial = functools.partial(entry.run, leaves, tensors, arguments), None
        if self.times_calls and not in_checkpoint():
            trial = self._trial(specialization, mode, entry)
        if trial is None:
            results = run()
        else:
            own = functools.partial(self.original, *arguments[0], **arguments[1])
            results = trial.serve(run, own, time.perf_counter() - started)
        self._remember(specialization, entry, leaves, mode, trial)
        return _Served(results)

    def _trial(
        self, specialization: Specialization, mode: Mode, entry: CompiledEntry
    ) -> SpeedTrial | None:
        """Return the speed trial of ``entry``; None if compiled code serves its calls untimed.

        Code for any size has no trial, because few of its calls have the same sizes.
        """
        always = self.checker is not None or self.tally.on_fallback == "raise" or mode.deterministic
        if always or specialization.family is not None:
            return None
        if entry.trial is None:
            what = f"{mode} {specialization.signature}"
            conclude = functools.partial(self.tally.note_verdict, what)
            entry.trial = SpeedTrial(entry.question, entry.compiled.captured.device, conclude)
        return entry.trial

    def _remember(
        self,
        specialization: Specialization,
        entry: CompiledEntry,
        leaves: list[Any],
        mode: Mode,
        trial: SpeedTrial | None,
    ) -> None:
        """Give ``entry`` a fast path, if it can have one, and check that path first from now on."""
        signature = specialization.signature
        path: ServingPath | None
        if trial is not None and trial.steps_aside:
            path = AsidePath(entry, trial, self.module, self.own, signature, leaves)
        else:
            path = fast = renewed_path(entry, signature, leaves)
            if fast is not None and trial is not None and trial.verdict is None:
                path = TimedPath(fast, trial, self.module, self.own)
        if path is not None and self._mode(specialization, leaves) == mode:
            self._ask_first(path, specialization)

    def _ask_first(self, path: ServingPath, specialization: Specialization) -> None:
        others = [known for known in self.fast_paths if known[0].code is not path.code]
        self.fast_paths = ((path, specialization), *others[: _MOST_FAST - 1])
        specialization.put_first(path.code)

    def _fall_back(
        self,
        reason: Reason,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.tally.note(reason)
        results = self.original(*args, **kwargs)
        if self._failed is not None:
            self._retry_if_settled()
        return results

    def __del__(self) -> None:
        self.sum_up()

    def sum_up(self) -> None:
        """Keep a summary of the calls, which is logged at the end of the process."""
        tally = self.__dict__.get("tally")  # None if __init__ has raised
        if tally is not None and tally.to_be_summed_up and self._process == os.getpid():
            tally.keep_summary(self.served())

    def _name(self) -> str:
        return type(self.module).__name__

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self
        own = None if self.own is None else rebound(self.own, self.module, module, memo)
        if STAND_IN in memo:
            return own or NO_ATTRIBUTE
        duplicate = Dispatcher(module, own, self.target, self.options, self.tally.on_fallback)
        duplicate.compiles_signatures = self.compiles_signatures
        duplicate.serve_sizes_like(self)
        if not self.options.freeze:  # no guard compares a copy's weights with the frozen ones
            duplicate.specializations = tuple(
                s.rebound(memo, duplicate.packing) for s in self.specializations
            )
        duplicate.packing.claim_like(self.packing)
        duplicate.cut = self.cut.renewed(duplicate)
        duplicate.checker = None if self.checker is None else self.checker.renewed()
        return duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled_forward(self.module, self.own)


@functools.cache
def _outside_of_graphs() -> Callable[..., Any]:
    """Return a function that calls a dispatcher, at which torch.compile breaks its graph."""

    def call(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return dispatcher(*args, **kwargs)

    reason = (
        "this module is dispatched to TVM (tvmbridge): torch.compile leaves it out of its graphs, "
        "and fullgraph=True needs remove_tvm_dispatch(module)"
    )
    disabled: Callable[..., Any] = torch.compiler.disable(call, reason=reason)
    return disabled

"""The dispatcher: the forward of a dispatched module, which chooses TVM or the original."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tvmbridge.compiler.packing import Packing
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.observe.hooks import hooked_submodule
from tvmbridge.graph_capture.observe.plain import unusual_in
from tvmbridge.graph_capture.surroundings import refused_now
from tvmbridge.graph_capture.trace.standins import STAND_IN, anything_requires_grad
from tvmbridge.runtime.any_size import AnySize
from tvmbridge.runtime.entry import Checks, CompiledEntry, FastPath
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.fallbacks import Tally, forget_summaries
from tvmbridge.runtime.guards.forwards import (
    StandsForForward,
    calling_module,
    forward_of_class,
    original_forward,
    rebound,
    references_of_a_call,
)
from tvmbridge.runtime.guards.mode import Mode, flags_of
from tvmbridge.runtime.guards.signature import Matched, Signature, nearest
from tvmbridge.runtime.guards.spelling import CONSTANT, NOT_TAKEN, Mismatch
from tvmbridge.runtime.specialization import Specialization

logger = logging.getLogger(__name__)

# So many entries with a fast guard are asked before any full guard.
_MOST_FAST = 4
# So many signatures calls may have compiled, where no sample was given; of a number that changes
# fewer, since each of its values is a signature.
_MOST_AT_CALLS = 4
_MOST_VALUES = 2
# References to a dispatcher while its module is called, and it is in no copy.
_ALONE = references_of_a_call()
# Of all dispatchers in the process.
_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


class Dispatcher(StandsForForward):
    """The forward of a dispatched module.

    It lives in the module's ``__dict__`` under ``forward``, which is all that a dispatched module
    differs by. A deep copy of the module has a dispatch of its own, with the same code and
    counters at zero; an unpickled module has none, since compiled code is not pickled.

    ``compiles_signatures``: calls with arguments of another signature compile code for it, up to a
    number of them; otherwise ``add_tvm_dispatch`` alone does.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any] | None,
        target: Any,
        options: CompileOptions,
        on_fallback: str = "warn",
    ) -> None:
        self.module = module
        self.own = own
        self.target = target
        self.options = options
        self.specializations: tuple[Specialization, ...] = ()
        self.tally = Tally(self._name(), on_fallback)
        self.compiles_signatures = False
        self.any_size: AnySize | None = None
        self.packing = Packing(module)
        self.compiler = Compiler(module, own, target, options, self.packing)
        self.checker: Checks | None = None
        self.dropped = 0
        self._fast: tuple[tuple[FastPath, Specialization], ...] = ()
        _dispatchers.add(self)
        self._process = os.getpid()
        self._uses = itertools.count(1)
        self._counting = threading.Lock()
        self._outside_of_graphs = _outside_of_graphs()
        functools.update_wrapper(self, self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own forward: of the instance, or the one that its class has now."""
        return self.own or forward_of_class(self.module)

    def __getattr__(self, name: str) -> Any:
        if name == "__func__" and sys._getframe(1).f_globals["__name__"].startswith("torch.jit"):
            raise BridgeError(
                f"torch.jit.script cannot read the forward of a dispatched {self._name()}: call "
                "remove_tvm_dispatch on it first, or script it before it is dispatched"
            )
        # What looks at functions (their code, defaults, globals) sees the module's own forward. Who
        # wraps what is behind a bound method (accelerate's prepare) wraps the dispatcher.
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
        known = self._fast
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
        with self.packing:
            return self._call(args, kwargs)

    def _is_of_copy(self, frame: types.FrameType) -> bool:
        return calling_module(frame) not in (None, self.module)

    def _serve_copy(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module that has taken over the attributes of this one, and changed some."""
        self.tally.note("it was made through a shallow copy or a replica of the module")
        own = self.own or forward_of_class(module)
        return own(*args, **kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool = False) -> Any:
        reason: str | None = None
        settling, known = False, self.specializations
        misfits: list[Mismatch] = []
        for specialization in self._candidates(known, misfits, args, kwargs):
            matched = specialization.signature.match(args, kwargs)
            if isinstance(matched, Mismatch):
                misfits.append(matched)
                continue
            leaves, arguments = matched
            mode = self._mode(specialization, leaves)
            if isinstance(mode, str):
                reason = mode
                break
            entry = specialization.chosen(mode, leaves)
            if entry is None:
                found = self._compiled(specialization, mode, matched, f"the first in mode {mode}")
                if isinstance(found, str):
                    reason = found
                    break
                entry = found
            tensors = entry.state.tensors()
            reason = entry.mismatch(leaves, tensors)
            if reason is not None:
                settling = entry.awaits_first()
                instead = self._instead(specialization, mode, entry, matched)
                if isinstance(instead, CompiledEntry):
                    entry, tensors = instead, instead.state.tensors()
                    reason = entry.mismatch(leaves, tensors)
                else:
                    reason = instead or reason
            if reason is None:
                specialization.last_use = next(self._uses)
                if self.checker is not None:
                    return self.checker.run(self.module, entry, leaves, tensors, arguments)
                results = entry.run(leaves, tensors, arguments)
                self._remember(specialization, entry, leaves, mode)
                return results
        why = reason or nearest(misfits) or "nothing is compiled"
        if reason is None and not again and self.compiles_signatures and self._has_room(misfits):
            refused = self._specialize(known, args, kwargs, misfits)
            if refused is None:
                return self._call(args, kwargs, again=True)
            why = refused
        return self._fall_back(why, args, kwargs, settling=settling)

    def _candidates(
        self,
        known: tuple[Specialization, ...],
        misfits: list[Mismatch],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[Specialization]:
        """Those that may be for the arguments of a call; where none fits, one of other sizes."""
        yield from known
        if self.any_size is not None and len(misfits) == len(known):
            found = self.any_size.specialization(known, args, kwargs)
            if found is not None:
                yield found

    def _has_room(self, misfits: Sequence[Mismatch]) -> bool:
        """Whether a call that fits no signature, for these reasons, may add one."""
        most = min(_MOST_AT_CALLS, self.options.max_specializations)
        return len(misfits) < most and sum(m.reason == CONSTANT for m in misfits) < _MOST_VALUES

    def _specialize(
        self,
        known: tuple[Specialization, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        misfits: Sequence[Mismatch],
    ) -> str | Mismatch | None:
        """Add a specialisation for the arguments of this call, beside those ``known`` to it.

        It is there when the call is looked at again, with code or the reason why it has none.

        Returns:
            why nothing can be compiled in this call, while it may in the next; None: it was added.
        """
        with compiling():
            if self.specializations is not known:  # another thread did
                return None
            specialization = Specialization(Signature(args, kwargs, self.original))
            matched = specialization.signature.match(args, kwargs)
            if not specialization.signature.is_taken:
                matched = NOT_TAKEN
            if isinstance(matched, Mismatch):
                return matched
            mode = self._mode(specialization, matched.leaves)
            if isinstance(mode, str):
                return mode
            misfit = nearest(misfits)
            why = "the first" if misfit is None else misfit.detail or misfit.reason
            found = self._compiled(specialization, mode, matched, why)
            if isinstance(found, str) and not specialization.failures:
                return found
            self.add(specialization)
            return None

    def _remember(
        self, specialization: Specialization, entry: CompiledEntry, leaves: list[Any], mode: Mode
    ) -> None:
        """Ask ``entry`` first at the next call."""
        fast = entry.renew_fast(specialization.signature, leaves)
        if fast is not None and self._mode(specialization, leaves) == mode:
            self._ask_first(fast, specialization)

    def _ask_first(self, fast: FastPath, specialization: Specialization) -> None:
        others = [known for known in self._fast if known[0].entry is not fast.entry]
        self._fast = ((fast, specialization), *others[: _MOST_FAST - 1])
        specialization.put_first(fast.entry)

    def _mode(self, specialization: Specialization, leaves: list[Any]) -> Mode | str:
        """The mode of this call; or why nothing that was compiled can serve it."""
        if os.getpid() != self._process:
            return "the process was forked after dispatch"
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        needs_grad = recording and self.anything_requires_grad(specialization, leaves)
        return Mode.of_now(self.module.training, needs_grad)

    def _compiled(
        self,
        specialization: Specialization,
        mode: Mode,
        matched: Matched,
        why: str,
    ) -> CompiledEntry | str:
        """The code for the mode and flags of this call, compiled now if it is the first, because
        of what it is; or why there is none."""
        flags = flags_of(self.module, matched.leaves)
        known = specialization.known(mode, flags)
        if known is not None:
            return known
        with compiling():
            # The module may be on its way: this is no failure for good.
            unusual = unusual_in(self.module)
            if unusual is not None:
                return unusual
            if hooked_submodule(self.module) is not None:
                return "a submodule has hooks"
            rehooked = [entry.state.rehooked() for _, entry in specialization.compiled()]
            if any(rehooked):
                return str(next(filter(None, rehooked)))
            most = self.options.max_specializations
            known = specialization.known(mode, flags) or specialization.full(mode, most)
            if known is not None:
                return known
            try:
                if specialization.family is not None:
                    entry = specialization.family(mode, matched)
                    specialization.add(mode, entry, most)
                    return entry
                return self.compile(specialization, mode, *matched.arguments, why=why)
            except Exception as error:
                # Whatever it is, the module's own forward may do better.
                reason = specialization.failures[mode, flags] = f"{mode}: {error}"
                return reason

    def _instead(
        self,
        specialization: Specialization,
        mode: Mode,
        unfit: CompiledEntry,
        matched: Matched,
    ) -> CompiledEntry | str | None:
        """Code in place of one that the call does not fit, where it may be compiled at a call.

        That is code which the first call has outdated, for it filled a cache, and code for another
        ``requires_grad``. None: the call differs otherwise.
        """
        if unfit.is_to_be_renewed():
            with compiling():
                specialization.remove(unfit)
                why = "the first has left the module otherwise"
                renewed = self._compiled(specialization, mode, matched, why)
                if isinstance(renewed, CompiledEntry):
                    renewed.fills_first = False
                    return renewed
            return None
        if not unfit.differs_in_flags_alone(matched.leaves, unfit.state.tensors()):
            return None
        return self._compiled(specialization, mode, matched, "requires_grad differs")

    def anything_requires_grad(self, specialization: Specialization, leaves: Sequence[Any]) -> bool:
        """Whether an argument or a tensor of the module requires a gradient."""
        if any(leaves[i].requires_grad for i, *_ in specialization.signature.tensors):
            return True
        states = [entry.state for _, entry in specialization.compiled()]
        if any(state.requires_grad() for state in states):
            return True
        # What was compiled for tells nothing of submodules that were inserted since.
        if any(state.is_whole() for state in states):
            return False
        return anything_requires_grad(self.module, ())

    def compile(
        self,
        specialization: Specialization,
        mode: Mode,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        why: str | None = None,
    ) -> CompiledEntry:
        """Compile ``specialization`` for ``mode``, in which the module must stand, and try it;
        ``why`` says what call asks for it."""
        self.forget_fast()
        entry = self.compiler.entry(specialization.signature, mode, tuple(args), kwargs, why)
        dropped = specialization.add(mode, entry, self.options.max_specializations)
        if dropped:
            with self._counting:
                self.dropped += dropped
        return entry

    def add(self, specialization: Specialization) -> None:
        """Keep ``specialization``; those that were not used for longest go where too many."""
        with self._counting:
            specialization.last_use = next(self._uses)
            kept = sorted((*self.specializations, specialization), key=lambda s: s.last_use)
            excess = max(0, len(kept) - self.options.max_specializations)
            self.specializations = tuple(kept[excess:])
            self.dropped += excess
        for dropped in kept[:excess]:
            logger.info("dropped the specialisation %s, not used for longest", dropped.signature)

    def _fall_back(
        self,
        reason: str | Mismatch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        settling: bool = False,
    ) -> Any:
        self.tally.note(reason, settling=settling)
        return self.original(*args, **kwargs)

    def served(self) -> int:
        """The calls that compiled code has served."""
        return sum(entry.calls for s in self.all_specializations() for _, entry in s.compiled())

    def all_specializations(self) -> list[Specialization]:
        """Those for samples, and those for calls of other sizes."""
        others = [] if self.any_size is None else self.any_size.instances()
        return [*self.specializations, *others]

    def __del__(self) -> None:
        self.sum_up()

    def sum_up(self) -> None:
        """Have the end of the process tell of the calls so far: no more are to come."""
        tally = self.__dict__.get("tally")  # what is made by halves has none
        if tally is not None and tally.to_be_summed_up and self._process == os.getpid():
            tally.keep_summary(self.served())

    def forget_fast(self) -> None:
        """Have the next call decided by the full guards."""
        self._fast = ()

    def renew_after_fork(self) -> None:
        """Forget code that was compiled in another process, whose threads are not in this one."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self.specializations = ()
            self._fast = ()
            if self.any_size is not None:
                self.any_size = AnySize(self.compiler)

    def _name(self) -> str:
        return type(self.module).__name__

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self
        own = None if self.own is None else rebound(self.own, self.module, module, memo)
        if STAND_IN in memo:
            return own or forward_of_class(module)
        duplicate = Dispatcher(module, own, self.target, self.options, self.tally.on_fallback)
        duplicate.compiles_signatures = self.compiles_signatures
        if self.any_size is not None:
            duplicate.any_size = AnySize(duplicate.compiler)
        duplicate.specializations = tuple(
            s.rebound(memo, duplicate.packing) for s in self.specializations
        )
        duplicate.packing.claim_like(self.packing)
        duplicate.checker = None if self.checker is None else self.checker.renewed()
        return duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        return original_forward, (self.module, self.own)


@functools.cache
def _outside_of_graphs() -> Callable[..., Any]:
    """Calls a dispatcher where torch.compile has broken its graph for it."""

    def call(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return dispatcher(*args, **kwargs)

    reason = (
        "this module is dispatched to TVM (tvmbridge): torch.compile leaves it out of its graphs, "
        "and fullgraph=True needs remove_tvm_dispatch(module)"
    )
    disabled: Callable[..., Any] = torch.compiler.disable(call, reason=reason)
    return disabled


def _forget_after_fork() -> None:
    # The threads that compiled code runs on are not in the new process.
    for dispatcher in list(_dispatchers):
        dispatcher.forget_fast()
    forget_summaries()


@atexit.register
def _keep_summaries() -> None:
    """Before those that were kept are logged: what is registered last runs first."""
    for dispatcher in list(_dispatchers):
        dispatcher.sum_up()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)

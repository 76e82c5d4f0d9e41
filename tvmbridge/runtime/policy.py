"""The policy of a dispatched module: which code calls may add to that of the samples."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tvmbridge.calls.plain import distributed_in, split_over_ranks, unusual_in
from tvmbridge.calls.standins import StandsForForward
from tvmbridge.core.errors import DataDependentError, StateWrittenError
from tvmbridge.core.locks import Lock
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.observe.effects import StateBefore
from tvmbridge.graph_capture.observe.hooks import hooked_submodule
from tvmbridge.runtime.any_size import AnySize
from tvmbridge.runtime.background import COMPILING, UnderWayError
from tvmbridge.runtime.changing_numbers import ChangingNumbers
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.family import OtherSizesError
from tvmbridge.runtime.guards.kinds import OTHER_SHAPE
from tvmbridge.runtime.guards.mode import Flags, Mode, flags_of
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.parts import Cut
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.runtime.specializations import Specializations

# Limits on signatures that calls compile: four in all, of which two may differ in a number alone,
# since each value of a number is another signature.
_MOST_AT_CALLS = 4
_MOST_VALUES = 2
# How often calls may compile because the module has changed, for each reason.
_MOST_STATES = 8
# A tool that prints the shapes of layers hooks submodules for one or two calls. Parts that are
# compiled for them would serve no further call.
_CALLS_WITH_HOOKS = 2
# A number in an attribute that changes so rarely counts as any other change of the module.
_RARELY = 16


class GivenCall(NamedTuple):
    """The arguments of a call, and the specialisations that were known when it began."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    known: tuple[Specialization, ...]


class Wanted(NamedTuple):
    """The code that a call wants.

    - ``specialization``: the specialisation for its arguments.
    - ``mode``: the mode of the call.
    - ``matched``: the leaves and arguments of the call, in the call form of the specialisation.
    """

    specialization: Specialization
    mode: Mode
    matched: Matched


class Unserved(NamedTuple):
    """Why known code has not served a call.

    - ``misfits``: the mismatch of the arguments with each specialisation that is for others.
    - ``reason``: why code for the arguments does not fit; None: nothing was compiled for them.
    - ``outgrown``: the entry that does not fit, because the module may have changed; or None.
    """

    misfits: list[Reason]
    reason: Reason | None = None
    outgrown: CompiledEntry | None = None


class _Failed(NamedTuple):
    """A compilation that failed.

    - ``specialization``: the specialisation that has no code.
    - ``key``: the mode and flags that were to be compiled.
    - ``before``: the module's state before the call that needed the code.
    """

    specialization: Specialization
    key: tuple[Mode, Flags]
    before: StateBefore


class Policy:
    """Finds the code for calls, and decides which code a call may add.

    - ``compiles_signatures``: whether a call with a new signature compiles code for it. If False,
      only ``add_tvm_dispatch`` adds signatures.
    - ``sizes``: compiles symbolic code for calls of other sizes; None: no symbolic code.
    - ``numbers``: decides which numbers of calls become inputs of code.
    - ``cut``: decides whether the module runs in parts.
    """

    def __init__(self, compiler: Compiler, kept: Specializations) -> None:
        self.compiler = compiler
        self.module, self.options = compiler.module, compiler.options
        self.kept = kept
        self.compiles_signatures = False
        self.sizes: AnySize | None = None
        self.numbers = ChangingNumbers()
        self.cut = Cut()
        self._failed: _Failed | None = None
        self._retried: set[int] = set()
        self._calls_with_hooks = 0
        # The number of calls whose code did not fit the changed module, by the reason.
        self._outgrown: Counter[str] = Counter()
        self._counting = Lock()

    def candidates(self, call: GivenCall, misfits: list[Reason]) -> Iterator[Specialization]:
        """Yield the known specialisations, and then one for any size if none of them matched.

        The caller appends the mismatch of each specialisation to ``misfits`` before the next.
        """
        args, kwargs, known = call
        yield from known
        if self.sizes is not None and len(misfits) == len(known):
            found = self.sizes.specialization(known, args, kwargs)
            if isinstance(found, Reason):
                misfits.append(found)
            elif found is not None:
                yield found

    def mode(self, specialization: Specialization, leaves: list[Any]) -> Mode | Reason:
        """Return the mode of this call, or the reason why no compiled code can serve it."""
        if os.getpid() != self.kept.paths.process:
            return Reason(Kind.FORKED)
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        needs_grad = recording and specialization.anything_requires_grad(self.module, leaves)
        if self.options.freeze and (self.module.training or needs_grad):
            return Reason(Kind.FROZEN_GRADIENTS if needs_grad else Kind.FROZEN_TRAINING)
        return Mode.of_now(self.module.training, needs_grad)

    def compile(self, wanted: Wanted) -> None:
        """Compile code for a sample, run it once, and keep it; the module must be in the mode."""
        self.kept.paths.forget()
        specialization, mode, matched = wanted
        family = specialization.family
        try:
            entry = None if family is None else family(mode, matched)
        except OtherSizesError:
            entry = None
        entry = entry or self._of_one_size(wanted)
        self.kept.keep(specialization, mode, entry)

    def _of_one_size(self, wanted: Wanted, why: str | None = None) -> CompiledEntry:
        specialization, mode, (_, (args, kwargs)) = wanted
        return self.compiler.entry(specialization.signature, mode, tuple(args), kwargs, why)

    def compiled(self, wanted: Wanted, why: str) -> CompiledEntry | Reason:
        """Return the code for the mode and flags of this call, or the reason why there is none.

        The code is compiled now if no earlier call has tried. ``why`` goes to the log.
        """
        specialization, mode, matched = wanted
        flags = flags_of(self.module, matched.leaves)
        known = specialization.known(mode, flags, matched.leaves)
        sizes = self.sizes
        if isinstance(known, Reason) and sizes is not None and sizes.single.is_due(specialization):
            specialization.failures.pop((mode, flags), None)
        elif known is not None:
            return known
        with compiling():
            # Not kept as a failure: the user may still be setting up the module.
            unusual = unusual_in(self.module) or specialization.hooked(self.module)
            if unusual is not None:
                return unusual
            most = self.options.max_specializations
            known = specialization.known(mode, flags, matched.leaves)
            known = known or specialization.full(mode, most)
            if known is not None:
                return known
            try:
                self.kept.paths.forget()
                entry = None if sizes is None else sizes.entry(*wanted)
                if entry is None:
                    entry = self._of_one_size(wanted, why)
                self.cut.instead_of(entry.compiled.eager_functions)
                self.kept.keep(specialization, mode, entry)
                return entry
            except UnderWayError:
                return COMPILING
            except Exception as error:
                # Any error: the module's own forward may serve the call all the same.
                kind = Kind.STATE_WRITTEN if isinstance(error, StateWrittenError) else Kind.FAILED
                reason = Reason(kind, f"{mode}: {error}")
                specialization.failures[mode, flags] = reason
                other_code = bool(specialization.compiled())
                # A first call may write state that settles, and then one graph is enough.
                unsettled = kind is Kind.STATE_WRITTEN and other_code
                if isinstance(error, DataDependentError) or unsettled:
                    self.cut.at(reason.text, of_state=unsettled)
                if not other_code:
                    self._failed = _Failed(specialization, (mode, flags), StateBefore(self.module))
                return reason

    def instead(self, wanted: Wanted, unfit: CompiledEntry) -> CompiledEntry | Reason | None:
        """Return code to replace ``unfit`` at this call, or the reason why it cannot be compiled.

        Code is replaced in three cases: the first call has filled a cache, ``requires_grad``
        differs, or forward branches otherwise by its arguments. None: the call differs in another
        way.
        """
        if unfit.is_to_be_renewed():
            with compiling():
                wanted.specialization.remove(unfit)
                self.kept.retire([unfit])
                renewed = self.compiled(wanted, "the first has left the module otherwise")
                if isinstance(renewed, CompiledEntry):
                    renewed.fills_first = False
                    return renewed
            return None
        if not unfit.is_other_variant(wanted.matched.leaves, unfit.state.tensors()):
            return None
        return self.compiled(wanted, "requires_grad or a branch differs")

    def add(
        self, call: GivenCall, found: Unserved, why: Reason | None
    ) -> tuple[bool, Reason | None]:
        """Add a specialisation for a call that known ones do not serve, because of ``why``.

        Return whether one was added, and otherwise the reason for the fallback.
        """
        if why is not None and found.reason is None:
            added = self._take_numbers(call, why)
            if isinstance(added, Reason) or added:
                return added is True, COMPILING
            why = self.numbers.explained(why)
        if self._take_attributes(found.outgrown) or self.has_room(found):
            why = self._specialize(call, why)
            if why is None and found.outgrown is not None:
                self._drop_if_replaced(found.outgrown)
            return why is None, why
        return False, why

    def _take_attributes(self, outgrown: CompiledEntry | None) -> bool:
        """Have code take the changed numbers in attributes as inputs from now on.

        Args:
            outgrown: the entry for the call's arguments, if it does not fit the changed module.

        Returns:
            Whether a number is an input from now on, and has been a constant so far.
        """
        attributes = self.compiler.attributes
        if not self.compiles_signatures or outgrown is None or self.options.freeze:
            return False
        if attributes is None or not attributes.want(outgrown.state.changed_numbers()):
            return False
        if self.sizes is not None:
            self.serve_sizes_like(self)
        return True

    def _drop_if_replaced(self, outgrown: CompiledEntry) -> None:
        """Drop an entry that has numbers as constants which newer code takes as inputs."""
        *others, newest = self.kept.known
        if not outgrown.state.changed_numbers():
            return
        if any(entry.compiled.captured.convention.held for _, entry in newest.compiled()):
            for specialization in others:
                if any(entry is outgrown for _, entry in specialization.compiled()):
                    specialization.remove(outgrown)
                    self.kept.retire([outgrown])

    def explained(self, why: Reason) -> Reason:
        """Return the reason of a fallback, completed by why a number is no input of the code.

        If the module was split over processes since it was compiled, that is the reason: its
        hooks and tensors changed because of it.
        """
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            split = split_over_ranks(self.module) or distributed_in(self.module)
            if split is not None:
                return split
        attributes = self.compiler.attributes
        return why if attributes is None else attributes.explained(why)

    def _specialize(self, call: GivenCall, why: Reason | None) -> Reason | None:
        """Add a specialisation for the arguments of this call.

        Return None if it was added, with code or with the reason of a failed compilation. Otherwise
        return why nothing can be compiled now; a later call may try again.
        """
        args, kwargs, known = call
        with compiling():
            if self.kept.known is not known:  # another thread did
                return None
            specialization = Specialization(Signature(args, kwargs, self.compiler.original))
            matched = specialization.signature.untaken() or specialization.signature.match(
                args, kwargs
            )
            if isinstance(matched, Reason):
                return matched
            mode = self.mode(specialization, matched.leaves)
            if isinstance(mode, Reason):
                return mode
            of = "the first" if why is None else why.example or why.text
            found = self.compiled(Wanted(specialization, mode, matched), of)
            if isinstance(found, Reason) and found is not COMPILING and not specialization.failures:
                return found
            self.kept.add(specialization)
            return None

    def _take_numbers(self, call: GivenCall, why: Reason) -> Reason | bool:
        """Add code that takes the numbers of this call as inputs, if earlier calls had others.

        Return whether code was added, by this thread or another; COMPILING if it is being compiled.
        """
        args, kwargs, known = call
        wanted = functools.partial(self.numbers.signature, known, args, kwargs)
        # Most calls that fall back differ in no number, and need not wait for a compilation.
        if not self.takes_numbers or wanted(self.compiler.original) is None:
            return False
        with compiling():
            if self.kept.known is not known:
                return True
            while found := wanted(self.compiler.original):
                signature, arguments = found
                specialization = Specialization(signature)
                leaves = signature.flatten(tuple(arguments[0]), arguments[1]) or []
                mode = self.mode(specialization, leaves)
                if isinstance(mode, Reason):
                    return False
                try:
                    self.kept.paths.forget()
                    of_call = Wanted(specialization, mode, Matched(leaves, arguments))
                    entry = self._of_one_size(of_call, why.detail or why.text)
                    self.cut.instead_of(entry.compiled.eager_functions)
                except UnderWayError:
                    return COMPILING
                except Exception as error:  # the number stays a constant
                    self.numbers.failed(signature, error)
                    continue
                self.kept.keep(specialization, mode, entry)
                self.kept.add(specialization)
                return True
        return False

    def cut_for_numbers(self, call: GivenCall) -> bool:
        """Serve calls in parts from now on, whose sizes an integer argument decides.

        Return whether that is possible, and the call differs from earlier ones in such an integer.
        """
        if self.cut.make is None or not self.compiles_signatures:
            return False
        why = self.numbers.deciding(call.known, call.args, call.kwargs)
        return why is not None and self.cut.at(why, of_state=True, tried=True)

    def cut_for_texts(self, why: Reason | None) -> bool:
        """Serve calls in parts from now on, because they differ in texts, and no code may be added.

        Graphs have texts as constants, whether forward reads them or not. Parts are compiled anew
        for texts that forward reads, and for no others: names of samples are in many batches.
        """
        if why is None or why.kind is not Kind.CHOICE or not self.compiles_signatures:
            return False
        return self.cut.at(why.text, of_state=True, tried=True)

    def cut_for_object(self, why: Reason | None) -> bool:
        """Serve calls in parts from now on because of an object that no graph can have.

        Return whether that is possible, and ``why``, the reason of a fallback, is such an object:
        an argument of an unknown class that holds tensors, an array of numpy, a sparse tensor or a
        DTensor of the module, or hooks of submodules that no graph calls.
        """
        if why is None:
            return False
        if why.kind is Kind.HOOKED:
            if self._calls_with_hooks < _CALLS_WITH_HOOKS or self.cut.of_regions:
                return False
            return self.cut.at_hooks(why.text)
        objects = (Kind.UNSEEN, Kind.ARRAY, Kind.HELD_UNUSUAL, Kind.DISTRIBUTED)
        if why.kind not in objects:
            return False
        tried = why.kind is not Kind.DISTRIBUTED
        return self.cut.at(": ".join(filter(None, (why.text, why.example))), tried=tried)

    def note_fallback(self, why: Reason) -> None:
        """Note that the module's own forward has served a call, because of ``why``."""
        self._calls_with_hooks += why.kind is Kind.HOOKED

    def join_if_unhooked(self) -> None:
        """Serve calls whole again if the hooks are gone because of which they run in parts."""
        if self.cut.of_hooks and hooked_submodule(self.module) is None:
            self.cut.end()

    def cut_for_any_size(self, why: Reason) -> bool:
        """Serve calls of other sizes in parts from now on; return whether that is possible.

        It is for modules whose code runs some operators in eager PyTorch, or is for one branch by
        values of arguments. Such code is compiled for one size, while parts take any size. Parts
        also take further branches, and numbers that a branch compares with arguments.
        """
        entries = [e for s in self.specializations() for _, e in s.compiled()]
        branches = any(e.state.branches.outcomes for e in entries)
        if why.kind in (Kind.FULL, Kind.CONSTANT):
            return branches and self.cut.at(why.text)
        if not self.compiles_signatures and self.sizes is None:
            return False
        of_one_size = branches or any(e.compiled.eager_functions for e in entries)
        return of_one_size and self.cut.at(why.text)

    def serve_any_size(self, spec: Any = None, guesses: bool = True) -> None:
        """Serve calls of changing sizes by symbolic code.

        Args:
            spec: the symbolic dimensions, as torch.export's ``dynamic_shapes``; None: the
                dimensions whose sizes calls change.
            guesses: whether symbols may be tried for rows that no call has changed.
        """
        self.sizes = AnySize(self.compiler, self.kept.retire, spec, guesses)

    def turn_to_any_size(self) -> bool:
        """Serve other sizes by symbolic code from now on; return whether this is a change.

        It is for a call that differs in sizes from all signatures, of which no more may have code
        of their own.
        """
        fixed = self.options.freeze or not self.compiles_signatures
        # Equal blocks share no symbolic code, whose compilation takes several times as long.
        fixed = fixed or self.compiler.shared is not None
        if self.sizes is not None or fixed:
            return False
        self.serve_any_size()
        return True

    def serve_sizes_like(self, other: Policy) -> None:
        """Serve calls of other sizes by the rules of ``other``, but without its compiled code."""
        sizes = other.sizes
        self.sizes = None if sizes is None else sizes.renewed(self.compiler, self.kept.retire)

    @property
    def takes_numbers(self) -> bool:
        """Whether a call may compile code that takes its numbers as inputs."""
        if self.sizes is None:
            return self.compiles_signatures
        return self.sizes.spec is None

    def has_room(self, found: Unserved) -> bool:
        """Whether a call that known code does not serve may compile code for its signature."""
        misfits, why, outgrown = found
        if not self.compiles_signatures:
            return False
        if outgrown is None:
            most = self.options.max_specializations
            if self.compiler.shared is None:  # otherwise many blocks compile it together
                most = min(_MOST_AT_CALLS, most)
            values = sum(m.kind is Kind.CONSTANT for m in misfits)
            return why is None and len(misfits) < most and values < _MOST_VALUES
        if self.options.freeze or why is None:
            return False
        by_number = outgrown.state.outgrown()
        if by_number is None:
            return False
        often = by_number and outgrown.calls < _RARELY
        most = 1 if self._resizes(found) else _MOST_VALUES if often else _MOST_STATES
        with self._counting:
            self._outgrown[why.text] += 1
            return self._outgrown[why.text] <= most

    def cut_for_resized_state(self, found: Unserved) -> bool:
        """Serve calls in parts from now on, if forward replaces a tensor by one of another size.

        A cache that grows at each call is an example. Parts take any size of it.
        """
        if not (self.compiles_signatures and self._resizes(found)):
            return False
        return self.cut.at(OTHER_SHAPE.text, of_state=True, tried=True)

    @staticmethod
    def _resizes(found: Unserved) -> bool:
        replaces = found.outgrown is not None and found.outgrown.state.replaces
        return replaces and found.reason == OTHER_SHAPE

    def specializations(self) -> list[Specialization]:
        """Return the specialisations for samples and the ones for calls of other sizes."""
        return [*self.kept.known, *(() if self.sizes is None else self.sizes.instances())]

    def retry_if_settled(self) -> None:
        """Let the next call compile again if forward, in this call, has set attributes it keeps.

        A first call may compute cached values by operations that cannot be compiled; later calls
        only read the values. It is tried once. A module that writes at each call then runs in
        parts: Python performs the writes.
        """
        failed, self._failed = self._failed, None
        if failed is None:
            return
        specialization, key, before = failed
        if id(specialization) not in self._retried:
            self._retried.add(id(specialization))
            if any(map(self._is_users, before.written())):
                specialization.failures.pop(key, None)
                self.cut.why = None
                return
        reason = specialization.failures.get(key)
        if isinstance(reason, Reason) and reason.kind is Kind.STATE_WRITTEN:
            self.cut.at(reason.text, of_state=True)

    def _is_users(self, name: str) -> bool:
        """Whether the attribute of this dotted name is the user's, and not a dispatcher."""
        path, _, attribute = name.rpartition(".")
        held = self.module.get_submodule(path).__dict__.get(attribute)
        return not isinstance(held, StandsForForward)

    def renew_after_fork(self) -> bool:
        """Drop all code after a fork: its threads do not exist in the new process.

        Return whether the process was forked.
        """
        if os.getpid() == self.kept.paths.process:
            return False
        self.kept.paths.process = os.getpid()
        self.kept.known = ()
        self.kept.paths.forget()
        self.serve_sizes_like(self)
        self.cut = self.cut.renewed()
        return True

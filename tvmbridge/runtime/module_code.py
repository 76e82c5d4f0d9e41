"""The compiled code of a dispatched module, and the rules by which a call may add to it."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.errors import DataDependentError, StateWrittenError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.observe.effects import StateBefore
from tvmbridge.graph_capture.observe.plain import unusual_in
from tvmbridge.runtime.any_size import AnySize
from tvmbridge.runtime.background import COMPILING, Background, UnderWayError
from tvmbridge.runtime.changing_attributes import ChangingAttributes
from tvmbridge.runtime.changing_numbers import ChangingNumbers
from tvmbridge.runtime.declared_sizes import DeclaredSizes
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.guards.forwards import StandsForForward, forward_of_class
from tvmbridge.runtime.guards.mode import Flags, Mode, flags_of
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.parts import Cut
from tvmbridge.runtime.room import Room
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.runtime.timed_path import ServingPath

logger = logging.getLogger(__name__)


class _Failed(NamedTuple):
    """A compilation that failed.

    - ``specialization``: the specialisation that has no code.
    - ``key``: the mode and flags that were to be compiled.
    - ``before``: the module's state before the call that needed the code.
    """

    specialization: Specialization
    key: tuple[Mode, Flags]
    before: StateBefore


class ModuleCode:
    """The specialisations of a module; calls find their code here or compile more.

    - ``compiles_signatures``: whether a call with a new signature compiles code for it, within
      the limits of ``room``. If False, only ``add_tvm_dispatch`` adds signatures.
    - ``any_size``: compiles symbolic code for calls of other sizes; None: no symbolic code.
    - ``dropped``: the number of specialisations and entries that were dropped.

    Args:
        module: the dispatched module.
        own: the forward that was set on the instance; None if it has only that of its class.
        target: the TVM target; None is this machine's CPU.
        options: options of the compilation.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any] | None,
        target: Any,
        options: CompileOptions,
    ) -> None:
        self.module = module
        self.own = own
        self.target = target
        self.options = options
        self.specializations: tuple[Specialization, ...] = ()
        self.compiles_signatures = False
        self.room = Room(options)
        self.numbers = ChangingNumbers()
        self._failed: _Failed | None = None
        self._retried: set[int] = set()
        self.any_size: AnySize | None = None
        self.cut = Cut()
        self.packing = ModulePacks(module)
        self.background = Background(options)
        self.attributes = ChangingAttributes(module)
        self.compiler = Compiler(
            module,
            own,
            target,
            options,
            self.packing,
            background=self.background,
            attributes=self.attributes,
        )
        self.dropped = 0
        self._retired_calls = 0
        # Paths whose fast guards are checked before any full guard, in this order.
        self.fast_paths: tuple[tuple[ServingPath, Specialization], ...] = ()
        self._process = os.getpid()
        self._uses = itertools.count(1)
        self._counting = threading.Lock()

    @property
    def original(self) -> Callable[..., Any]:
        """Return the module's own forward: the instance's, or the one its class has now."""
        return self.own or forward_of_class(self.module)

    def _mode(self, specialization: Specialization, leaves: list[Any]) -> Mode | Reason:
        """Return the mode of this call, or the reason why no compiled code can serve it."""
        if os.getpid() != self._process:
            return Reason(Kind.FORKED)
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        needs_grad = recording and specialization.anything_requires_grad(self.module, leaves)
        if self.options.freeze and (self.module.training or needs_grad):
            return Reason(Kind.FROZEN_GRADIENTS if needs_grad else Kind.FROZEN_TRAINING)
        return Mode.of_now(self.module.training, needs_grad)

    def compile(
        self,
        specialization: Specialization,
        mode: Mode,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> CompiledEntry:
        """Compile ``specialization`` for ``mode``, run the code once, and keep it.

        The module must be in ``mode`` now.
        """
        self.forget_fast()
        signature = specialization.signature
        if specialization.family is None:
            entry = self.compiler.entry(signature, mode, tuple(args), kwargs)
        else:
            leaves = signature.flatten(tuple(args), kwargs) or []
            entry = specialization.family(mode, Matched(leaves, (tuple(args), dict(kwargs))))
        self._keep(specialization, mode, entry)
        return entry

    def _keep(self, specialization: Specialization, mode: Mode, entry: CompiledEntry) -> None:
        dropped = specialization.add(mode, entry, self.options.max_specializations)
        if dropped:
            with self._counting:
                self.dropped += len(dropped)
            self._retire(dropped)

    def _retire(self, entries: Iterable[CompiledEntry]) -> None:
        """Add the calls of entries that are no longer kept to the total; drop all fast paths."""
        self.forget_fast()
        with self._counting:
            self._retired_calls += sum(entry.calls for entry in entries)

    def served(self) -> int:
        """Return how many calls compiled code has served, code that was dropped included."""
        kept = [entry.calls for s in self.all_specializations() for _, entry in s.compiled()]
        return sum(kept) + self._retired_calls + self.cut.served

    def add(self, specialization: Specialization) -> None:
        """Keep ``specialization``; above the limit, drop the least recently used ones."""
        with self._counting:
            specialization.last_use = next(self._uses)
            kept = sorted((*self.specializations, specialization), key=lambda s: s.last_use)
            excess = max(0, len(kept) - self.options.max_specializations)
            self.specializations = tuple(kept[excess:])
            self.dropped += excess
        for dropped in kept[:excess]:
            self._retire(entry for _, entry in dropped.compiled())
            logger.info("dropped the specialisation %s, not used for longest", dropped.signature)

    def _compiled(
        self,
        specialization: Specialization,
        mode: Mode,
        matched: Matched,
        why: str,
    ) -> CompiledEntry | Reason:
        """Return the code for the mode and flags of this call, or the reason why there is none.

        The code is compiled now if no earlier call has tried. ``why`` goes to the log.
        """
        flags = flags_of(self.module, matched.leaves)
        known = specialization.known(mode, flags)
        sizes = self.any_size
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
            known = specialization.known(mode, flags) or specialization.full(mode, most)
            if known is not None:
                return known
            try:
                self.forget_fast()
                entry = None if sizes is None else sizes.entry(specialization, mode, matched)
                if entry is None:
                    signature, (args, kwargs) = specialization.signature, matched.arguments
                    entry = self.compiler.entry(signature, mode, tuple(args), kwargs, why)
                self.cut.instead_of(entry.compiled.eager_functions)
                self._keep(specialization, mode, entry)
                return entry
            except UnderWayError:
                return COMPILING
            except Exception as error:
                # Any error: the module's own forward may serve the call all the same.
                kind = Kind.STATE_WRITTEN if isinstance(error, StateWrittenError) else Kind.FAILED
                reason = Reason(kind, f"{mode}: {error}")
                specialization.failures[mode, flags] = reason
                if isinstance(error, DataDependentError):
                    self.cut.at(reason.text)
                if not specialization.compiled():
                    self._failed = _Failed(specialization, (mode, flags), StateBefore(self.module))
                return reason

    def _cut_for_any_size(self, why: str) -> bool:
        """Serve calls of other sizes in parts from now on; return whether that is possible.

        It is for modules whose code runs some operators in eager PyTorch. Such code is compiled
        for one size, while parts take any size.
        """
        if not self.compiles_signatures and self.any_size is None:
            return False
        entries = [e for s in self.all_specializations() for _, e in s.compiled()]
        return any(e.compiled.eager_functions for e in entries) and self.cut.at(why)

    def _retry_if_settled(self) -> None:
        """Let the next call compile again if forward, in this call, has set attributes it keeps.

        A first call may compute cached values by operations that cannot be compiled; later calls
        only read the values. It is tried once, so a module that writes at each call is not
        compiled at each call.
        """
        failed, self._failed = self._failed, None
        if failed is not None and id(failed.specialization) not in self._retried:
            self._retried.add(id(failed.specialization))
            if any(map(self._is_users, failed.before.written())):
                failed.specialization.failures.pop(failed.key, None)
                self.cut.why = None

    def _is_users(self, name: str) -> bool:
        """Whether the attribute of this dotted name is the user's, and not a dispatcher."""
        path, _, attribute = name.rpartition(".")
        held = self.module.get_submodule(path).__dict__.get(attribute)
        return not isinstance(held, StandsForForward)

    def _instead(
        self,
        specialization: Specialization,
        mode: Mode,
        unfit: CompiledEntry,
        matched: Matched,
    ) -> CompiledEntry | Reason | None:
        """Return code to replace ``unfit`` at this call, or the reason why it cannot be compiled.

        Code is replaced in two cases: the first call has filled a cache, or ``requires_grad``
        differs. None: the call differs in another way.
        """
        if unfit.is_to_be_renewed():
            with compiling():
                specialization.remove(unfit)
                self._retire([unfit])
                why = "the first has left the module otherwise"
                renewed = self._compiled(specialization, mode, matched, why)
                if isinstance(renewed, CompiledEntry):
                    renewed.fills_first = False
                    return renewed
            return None
        if not unfit.differs_in_flags_alone(matched.leaves, unfit.state.tensors()):
            return None
        return self._compiled(specialization, mode, matched, "requires_grad differs")

    def _candidates(
        self,
        known: tuple[Specialization, ...],
        misfits: list[Reason],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[Specialization]:
        """Yield the known specialisations, and then one for any size if none of them matched.

        The caller appends the mismatch of each specialisation to ``misfits`` before the next.
        """
        yield from known
        if self.any_size is not None and len(misfits) == len(known):
            found = self.any_size.specialization(known, args, kwargs)
            if isinstance(found, Reason):
                misfits.append(found)
            elif found is not None:
                yield found

    def drop_outdated(self) -> None:
        """Drop code whose frozen weights have changed since, together with their packed form."""
        if not self.options.freeze:
            return
        for specialization in self.specializations:
            for _, entry in specialization.compiled():
                if entry.frozen is not None and entry.frozen.changed(entry.state.tensors()):
                    specialization.remove(entry)
                    self._retire([entry])
        self.specializations = tuple(s for s in self.specializations if s.compiled())
        self.forget_fast()

    def all_specializations(self) -> list[Specialization]:
        """Return the specialisations for samples and the ones for calls of other sizes."""
        others = [] if self.any_size is None else self.any_size.instances()
        return [*self.specializations, *others]

    def serve_any_size(self, spec: Any = None) -> None:
        """Serve calls of changing sizes by symbolic code.

        Args:
            spec: the symbolic dimensions, as torch.export's ``dynamic_shapes``; None: the
                dimensions whose sizes calls change.
        """
        of_module = self.compiler, self._retire
        given = None if spec is None else DeclaredSizes(*of_module, spec, self.original)
        self.any_size = given or AnySize(*of_module)

    def _turn_to_any_size(self, misfits: Sequence[Reason]) -> bool:
        """Serve other sizes by symbolic code from now on; return whether this is a change.

        It is for a call that differs in sizes from all signatures, of which no more may have code
        of their own.

        Args:
            misfits: why each signature does not fit the call.
        """
        if self.any_size is not None or self.options.freeze:
            return False
        if not any(m.kind is Kind.SHAPE for m in misfits):
            return False
        self.serve_any_size()
        return True

    def serve_sizes_like(self, other: ModuleCode) -> None:
        """Serve calls of other sizes by the rules of ``other``, but without its compiled code."""
        sizes = other.any_size
        self.any_size = None if sizes is None else sizes.renewed(self.compiler, self._retire)

    def _specialize(
        self,
        known: tuple[Specialization, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: Reason | None,
    ) -> Reason | None:
        """Add a specialisation for the arguments of this call.

        Args:
            known: the specialisations that the call has tried.
            args: the positional arguments.
            kwargs: the keyword arguments.
            why: why the known specialisations do not serve the call.

        Returns:
            None if it was added, with code or with the reason of a failed compilation. Otherwise
            why nothing can be compiled now; a later call may try again.
        """
        with compiling():
            if self.specializations is not known:  # another thread did
                return None
            specialization = Specialization(Signature(args, kwargs, self.original))
            matched = specialization.signature.untaken() or specialization.signature.match(
                args, kwargs
            )
            if isinstance(matched, Reason):
                return matched
            mode = self._mode(specialization, matched.leaves)
            if isinstance(mode, Reason):
                return mode
            of = "the first" if why is None else why.example or why.text
            found = self._compiled(specialization, mode, matched, of)
            if isinstance(found, Reason) and found is not COMPILING and not specialization.failures:
                return found
            self.add(specialization)
            return None

    def _take_numbers(
        self,
        known: tuple[Specialization, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        why: Reason,
    ) -> Reason | bool:
        """Add code that takes the numbers of this call as inputs, if earlier calls had others.

        Args:
            known: the specialisations that the call has tried.
            args: the positional arguments.
            kwargs: the keyword arguments.
            why: why the known specialisations do not serve the call.

        Returns:
            Whether code was added, by this thread or another; COMPILING if it is being compiled.
        """
        compiles = self.compiles_signatures or self.any_size is not None
        if not compiles or isinstance(self.any_size, DeclaredSizes):
            return False
        # Most calls that fall back differ in no number, and need not wait for a compilation.
        if self.numbers.signature(known, args, kwargs, self.original) is None:
            return False
        with compiling():
            if self.specializations is not known:
                return True
            while found := self.numbers.signature(known, args, kwargs, self.original):
                signature, (given, named) = found
                specialization = Specialization(signature)
                mode = self._mode(specialization, signature.flatten(tuple(given), named) or [])
                if isinstance(mode, Reason):
                    return False
                try:
                    self.forget_fast()
                    reason = why.detail or why.text
                    entry = self.compiler.entry(signature, mode, tuple(given), named, reason)
                    self.cut.instead_of(entry.compiled.eager_functions)
                except UnderWayError:
                    return COMPILING
                except Exception as error:  # the number stays a constant
                    self.numbers.failed(signature, error)
                    continue
                self._keep(specialization, mode, entry)
                self.add(specialization)
                return True
        return False

    def _take_attributes(self, outgrown: CompiledEntry | None) -> bool:
        """Have code take the changed numbers in attributes as inputs from now on.

        Args:
            outgrown: the entry for the call's arguments, if it does not fit the changed module.

        Returns:
            Whether a number is an input from now on, and has been a constant so far.
        """
        if outgrown is None or self.options.freeze:
            return False
        if not self.attributes.want(outgrown.state.changed_numbers()):
            return False
        if self.any_size is not None:
            self.serve_sizes_like(self)
        return True

    def _drop_if_replaced(self, outgrown: CompiledEntry) -> None:
        """Drop an entry that has numbers as constants which newer code takes as inputs."""
        newest = [entry for _, entry in self.specializations[-1].compiled()]
        if not outgrown.state.changed_numbers():
            return
        if any(entry.compiled.captured.convention.held for entry in newest):
            for specialization in self.specializations[:-1]:
                if any(entry is outgrown for _, entry in specialization.compiled()):
                    specialization.remove(outgrown)
                    self._retire([outgrown])

    def forget_fast(self) -> None:
        """Drop the fast paths, so that the full guards check the next call."""
        self.fast_paths = ()

    def renew_after_fork(self) -> None:
        """Drop all code after a fork: its threads do not exist in the new process."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self.specializations = ()
            self.fast_paths = ()
            self.serve_sizes_like(self)

"""What is compiled for a module, and what a call may add to it."""

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
from tvmbridge.core.errors import DataDependentError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.observe.effects import StateBefore
from tvmbridge.graph_capture.observe.plain import unusual_in
from tvmbridge.runtime.any_size import AnySize
from tvmbridge.runtime.background import Background, UnderWayError
from tvmbridge.runtime.declared_sizes import DeclaredSizes
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.fallbacks import COMPILING
from tvmbridge.runtime.guards.forwards import StandsForForward, forward_of_class
from tvmbridge.runtime.guards.mode import Flags, Mode, flags_of
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.guards.spelling import Mismatch
from tvmbridge.runtime.parts import Cut
from tvmbridge.runtime.room import Room
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.runtime.timed_path import ServingPath

logger = logging.getLogger(__name__)

_FORKED = "the process was forked after dispatch"
_IN_TRAINING = "the weights are frozen, and the module is in train mode"
_NO_GRADIENTS = "the weights are frozen, and autograd records the call (use torch.no_grad())"


class _Failed(NamedTuple):
    """A compilation that failed, and the module before the call that asked for it."""

    specialization: Specialization
    key: tuple[Mode, Flags]
    before: StateBefore


class ModuleCode:
    """The specialisations of a module, and how a call comes to more of them.

    ``compiles_signatures``: calls with arguments of another signature compile code for it, up to a
    number of them; otherwise ``add_tvm_dispatch`` alone does. ``any_size``: calls of other sizes
    compile symbolic code (None: they do not).
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
        self._failed: _Failed | None = None
        self._retried: set[int] = set()
        self.any_size: AnySize | None = None
        self.cut = Cut()
        self.packing = ModulePacks(module)
        self.background = Background(options)
        self.compiler = Compiler(
            module, own, target, options, self.packing, background=self.background
        )
        self.dropped = 0
        self._retired_calls = 0
        # Those that are asked before any full guard, with a guard of their own.
        self.fast_paths: tuple[tuple[ServingPath, Specialization], ...] = ()
        self._process = os.getpid()
        self._uses = itertools.count(1)
        self._counting = threading.Lock()

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own forward: of the instance, or the one that its class has now."""
        return self.own or forward_of_class(self.module)

    def _mode(self, specialization: Specialization, leaves: list[Any]) -> Mode | str:
        """The mode of this call; or why nothing that was compiled can serve it."""
        if os.getpid() != self._process:
            return _FORKED
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        needs_grad = recording and specialization.anything_requires_grad(self.module, leaves)
        if self.options.freeze and (self.module.training or needs_grad):
            return _NO_GRADIENTS if needs_grad else _IN_TRAINING
        return Mode.of_now(self.module.training, needs_grad)

    def compile(
        self,
        specialization: Specialization,
        mode: Mode,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> CompiledEntry:
        """Compile ``specialization`` for ``mode``, in which the module must stand, and try it."""
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
        """Count the calls of code that is kept no longer; it serves no further ones."""
        self.forget_fast()
        with self._counting:
            self._retired_calls += sum(entry.calls for entry in entries)

    def served(self) -> int:
        """The calls that compiled code has served, that which was dropped since included."""
        kept = [entry.calls for s in self.all_specializations() for _, entry in s.compiled()]
        return sum(kept) + self._retired_calls + self.cut.served

    def add(self, specialization: Specialization) -> None:
        """Keep ``specialization``; those that were not used for longest go where too many."""
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
    ) -> CompiledEntry | str:
        """The code for the mode and flags of this call, compiled now if it is the first, because
        of what it is; or why there is none."""
        flags = flags_of(self.module, matched.leaves)
        known = specialization.known(mode, flags)
        sizes = self.any_size
        if isinstance(known, str) and sizes is not None and sizes.single.is_due(specialization):
            specialization.failures.pop((mode, flags), None)
        elif known is not None:
            return known
        with compiling():
            # The module may be on its way: this is no failure for good.
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
                # Whatever it is, the module's own forward may do better.
                reason = specialization.failures[mode, flags] = f"{mode}: {error}"
                if isinstance(error, DataDependentError):
                    self.cut.at(reason)
                if not specialization.compiled():
                    self._failed = _Failed(specialization, (mode, flags), StateBefore(self.module))
                return reason

    def _cut_for_any_size(self, why: str) -> bool:
        """Have calls of other sizes served in parts, where code runs a part in eager PyTorch.

        Such code is for one size, and parts are for any.
        """
        if not self.compiles_signatures and self.any_size is None:
            return False
        entries = [e for s in self.all_specializations() for _, e in s.compiled()]
        return any(e.compiled.eager_functions for e in entries) and self.cut.at(why)

    def _retry_if_settled(self) -> None:
        """Have the next call compiled where the own forward, in this one, has made what it keeps.

        The first call may compute, by what cannot be compiled, what others find. It is looked at
        once: whoever writes at each call is not compiled at each.
        """
        failed, self._failed = self._failed, None
        if failed is not None and id(failed.specialization) not in self._retried:
            self._retried.add(id(failed.specialization))
            if any(map(self._is_users, failed.before.written())):
                failed.specialization.failures.pop(failed.key, None)
                self.cut.why = None

    def _is_users(self, name: str) -> bool:
        """Whether the attribute of this dotted name is the user's: a dispatch changes itself."""
        path, _, attribute = name.rpartition(".")
        held = self.module.get_submodule(path).__dict__.get(attribute)
        return not isinstance(held, StandsForForward)

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
        misfits: list[Mismatch],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[Specialization]:
        """Those that may be for the arguments of a call; where none fits, one of other sizes."""
        yield from known
        if self.any_size is not None and len(misfits) == len(known):
            found = self.any_size.specialization(known, args, kwargs)
            if isinstance(found, Mismatch):
                misfits.append(found)
            elif found is not None:
                yield found

    def drop_outdated(self) -> None:
        """Forget code whose frozen weights have changed since: with it goes their packed form."""
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
        """Those for samples, and those for calls of other sizes."""
        others = [] if self.any_size is None else self.any_size.instances()
        return [*self.specializations, *others]

    def serve_any_size(self, spec: Any = None) -> None:
        """Have calls of sizes that change served by symbolic code: as ``spec`` says, or any."""
        of_module = self.compiler, self._retire
        given = None if spec is None else DeclaredSizes(*of_module, spec, self.original)
        self.any_size = given or AnySize(*of_module)

    def serve_sizes_like(self, other: ModuleCode) -> None:
        """Have calls of other sizes served as ``other`` does; nothing is compiled for them."""
        sizes = other.any_size
        self.any_size = None if sizes is None else sizes.renewed(self.compiler, self._retire)

    def _specialize(
        self,
        known: tuple[Specialization, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: str | Mismatch | None,
    ) -> str | Mismatch | None:
        """Add a specialisation for the arguments of this call, beside those ``known`` to it, which
        do not serve it because of ``why``.

        It is there when the call is looked at again, with code or the reason why it has none.

        Returns:
            why nothing can be compiled in this call, while it may in the next; None: it was added.
        """
        with compiling():
            if self.specializations is not known:  # another thread did
                return None
            specialization = Specialization(Signature(args, kwargs, self.original))
            matched = specialization.signature.untaken() or specialization.signature.match(
                args, kwargs
            )
            if isinstance(matched, Mismatch):
                return matched
            mode = self._mode(specialization, matched.leaves)
            if isinstance(mode, str):
                return mode
            if isinstance(why, Mismatch):
                why = why.detail or why.reason
            found = self._compiled(specialization, mode, matched, why or "the first")
            if isinstance(found, str) and found != COMPILING and not specialization.failures:
                return found
            self.add(specialization)
            return None

    def forget_fast(self) -> None:
        """Have the next call decided by the full guards."""
        self.fast_paths = ()

    def renew_after_fork(self) -> None:
        """Forget code that was compiled in another process, whose threads are not in this one."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self.specializations = ()
            self.fast_paths = ()
            self.serve_sizes_like(self)

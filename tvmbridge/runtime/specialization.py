"""A specialisation: one input signature, with the code compiled for it in each mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.graph_capture.observe.hooks import hooked_submodule
from tvmbridge.graph_capture.trace.standins import anything_requires_grad
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.guards.mode import Flags, Mode
from tvmbridge.runtime.guards.signature import Matched, Signature

_DROPPED = (
    "code for this requires_grad of inputs and parameters was dropped, of more than "
    "max_specializations not used for longest"
)
_FULL = (
    "there is code for max_specializations choices of requires_grad of inputs and parameters, and "
    "not for this one"
)


class Specialization:
    """One signature and its entries by mode, in each mode by ``requires_grad`` of all tensors.

    Of a mode the entry that was used last is the first. What could not be compiled has a reason,
    and so has what was dropped: neither is tried again by calls.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        # Makes code for a mode and a call where the sizes are those of symbolic code.
        self.family: Callable[[Mode, Matched], CompiledEntry] | None = None
        self.entries: dict[Mode, tuple[CompiledEntry, ...]] = {}
        self.failures: dict[tuple[Mode, Flags], str] = {}
        self.last_use = 0
        self._changing = threading.Lock()

    def compiled(self) -> list[tuple[Mode, CompiledEntry]]:
        """The entries of now by mode; another thread may compile one meanwhile."""
        return [(mode, v) for mode, entries in list(self.entries.items()) for v in entries]

    def chosen(self, mode: Mode, leaves: Sequence[Any]) -> CompiledEntry | None:
        """The entry for a call in this mode; where none fits its flags, the one used last."""
        entries = self.entries.get(mode)
        if not entries:
            return None
        if len(entries) == 1:
            return entries[0]
        for entry in entries:
            if entry.fits_flags(leaves, entry.state.tensors()):
                if entry is not entries[0]:
                    self.put_first(entry)
                return entry
        return entries[0]

    def anything_requires_grad(self, module: nn.Module, leaves: Sequence[Any]) -> bool:
        """Whether an argument of a call or a tensor of ``module`` requires a gradient."""
        if any(leaves[i].requires_grad for i, *_ in self.signature.tensors):
            return True
        states = [entry.state for _, entry in self.compiled()]
        if any(state.requires_grad() for state in states):
            return True
        # What was compiled for tells nothing of submodules that were inserted since.
        if any(state.is_whole() for state in states):
            return False
        return anything_requires_grad(module, ())

    def hooked(self, module: nn.Module) -> str | None:
        """Why the hooks that ``module`` has now keep it from being compiled."""
        if hooked_submodule(module) is not None:
            return "a submodule has hooks"
        rehooked = (entry.state.rehooked() for _, entry in self.compiled())
        return next((reason for reason in rehooked if reason), None)

    def put_first(self, entry: CompiledEntry) -> None:
        """Note that of its mode ``entry`` is the one that was used last."""
        with self._changing:
            # Another thread may have dropped it.
            for mode, entries in self.entries.items():
                if entry in entries:
                    self.entries[mode] = (entry, *(e for e in entries if e is not entry))

    def known(self, mode: Mode, flags: Flags) -> CompiledEntry | str | None:
        """What was compiled for these flags, or why it is not there; None: it was not tried."""
        entries = self.entries.get(mode, ())
        found = next((v for v in entries if v.flags == flags), None)
        return found or self.failures.get((mode, flags))

    def full(self, mode: Mode, most: int) -> str | None:
        """Why calls may not compile further code in ``mode``; None: they may."""
        tried = sum(failed == mode for failed, _ in list(self.failures))
        return _FULL if len(self.entries.get(mode, ())) + tried >= most else None

    def add(self, mode: Mode, entry: CompiledEntry, most: int) -> tuple[CompiledEntry, ...]:
        """Keep ``entry``; of more than ``most`` in a mode the others go, and are returned."""
        with self._changing:
            others = [v for v in self.entries.get(mode, ()) if v.flags != entry.flags]
            kept = (entry, *others)
            self.entries[mode] = kept[:most]
            self.failures.pop((mode, entry.flags), None)
            for dropped in kept[most:]:
                self.failures[mode, dropped.flags] = _DROPPED
        return kept[most:]

    def remove(self, entry: CompiledEntry) -> None:
        """Keep ``entry`` no longer."""
        with self._changing:
            for mode, entries in list(self.entries.items()):
                self.entries[mode] = tuple(v for v in entries if v is not entry)

    def rebound(self, memo: Mapping[int, Any], packing: ModulePacks) -> Specialization:
        """The same code for a deep copy of the module, with counters at zero.

        Code that no longer fits the module is not copied: the copy could not tell.
        """
        copy = Specialization(self.signature)
        for mode, entries in list(self.entries.items()):
            fitting = [v for v in entries if not v.state.replaced()]
            copy.entries[mode] = tuple(v.rebound(memo, packing) for v in fitting)
        copy.failures = dict(self.failures)
        copy.last_use = self.last_use
        return copy

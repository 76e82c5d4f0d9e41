"""A specialisation: one signature of arguments, with the code compiled for it in each mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from tvmbridge.calls.standins import anything_requires_grad
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.locks import Lock
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.graph_capture.observe.hooks import hooked_submodule
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.guards.mode import Flags, Mode
from tvmbridge.runtime.guards.signature import Matched, Signature

# Numbers the uses of all specialisations.
USES = itertools.count(1)


class Specialization:
    """One signature, with an entry for each mode and each set of ``requires_grad`` flags.

    - ``entries``: the entries by mode, the most recently used one first.
    - ``failures``: by mode and flags, why there is no code: compilation failed, or the code was
      dropped. Calls do not try these again.
    - ``family``: compiles an entry from the symbolic code of a shape class; None: the code is
      for the sizes of this signature.
    - ``last_use``: the number of the last use.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        # None: the code is compiled for the sizes of this signature alone.
        self.family: Callable[[Mode, Matched], CompiledEntry | None] | None = None
        self.entries: dict[Mode, tuple[CompiledEntry, ...]] = {}
        self.failures: dict[tuple[Mode, Flags], Reason] = {}
        self.last_use = 0
        self._changing = Lock()

    def compiled(self) -> list[tuple[Mode, CompiledEntry]]:
        """Return all present entries with their modes; safe while another thread adds one."""
        return [(mode, v) for mode, entries in list(self.entries.items()) for v in entries]

    def chosen(self, mode: Mode, leaves: Sequence[Any]) -> CompiledEntry | None:
        """Return the entry for a call in this mode; None if there is no entry.

        If no entry has the call's ``requires_grad`` flags and branches, return the most recently
        used one.
        """
        entries = self.entries.get(mode)
        if not entries:
            return None
        if len(entries) == 1:
            return entries[0]
        for entry in entries:
            if entry.is_variant_for(leaves, entry.state.tensors()):
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
        # The states know all tensors, unless submodules were inserted since the capture.
        if any(state.is_whole() for state in states):
            return False
        return anything_requires_grad(module, ())

    def hooked(self, module: nn.Module) -> Reason | None:
        """Return why the hooks on ``module`` now prevent a compilation; None if they do not."""
        if hooked_submodule(module) is not None:
            return Reason(Kind.HOOKED)
        rehooked = (entry.state.rehooked() for _, entry in self.compiled())
        return next((reason for reason in rehooked if reason), None)

    def put_first(self, entry: CompiledEntry) -> None:
        """Mark ``entry`` as the most recently used entry of its mode."""
        with self._changing:
            # Another thread may have dropped it.
            for mode, entries in self.entries.items():
                if entry in entries:
                    self.entries[mode] = (entry, *(e for e in entries if e is not entry))

    def known(
        self, mode: Mode, flags: Flags, leaves: Sequence[Any]
    ) -> CompiledEntry | Reason | None:
        """Return the entry for this mode and call, or why there is none; None: never tried."""
        entries = (v for v in self.entries.get(mode, ()) if v.flags == flags)
        found = next((v for v in entries if v.state.branches.hold(leaves)), None)
        return found or self.failures.get((mode, flags))

    def full(self, mode: Mode, most: int) -> Reason | None:
        """Return why ``mode`` may have no more entries and failures than ``most``, or None."""
        tried = sum(failed == mode for failed, _ in list(self.failures))
        return Reason(Kind.FULL) if len(self.entries.get(mode, ())) + tried >= most else None

    def add(self, mode: Mode, entry: CompiledEntry, most: int) -> tuple[CompiledEntry, ...]:
        """Keep ``entry`` as the last used one; return those that exceed ``most`` in its mode."""
        with self._changing:
            others = [v for v in self.entries.get(mode, ()) if v.variant != entry.variant]
            kept = (entry, *others)
            self.entries[mode] = kept[:most]
            self.failures.pop((mode, entry.flags), None)
            for dropped in kept[most:]:
                self.failures[mode, dropped.flags] = Reason(Kind.DROPPED)
        return kept[most:]

    def remove(self, entry: CompiledEntry) -> None:
        """Drop ``entry``."""
        with self._changing:
            for mode, entries in list(self.entries.items()):
                self.entries[mode] = tuple(v for v in entries if v is not entry)

    def rebound(self, memo: Mapping[int, Any], packing: ModulePacks) -> Specialization:
        """Return a specialisation with the same code for a deep copy of the module.

        Counters start at zero. Code for a submodule that was replaced since is not copied, because
        the guards of the copy could not notice the replacement.
        """
        copy = Specialization(self.signature)
        for mode, entries in list(self.entries.items()):
            fitting = [v for v in entries if not v.state.replaced()]
            copy.entries[mode] = tuple(v.rebound(memo, packing) for v in fitting)
        copy.failures = dict(self.failures)
        copy.last_use = self.last_use
        return copy

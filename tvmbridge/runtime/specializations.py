"""The specialisations of a module that are kept, within limits, with counts of their calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tvmbridge.core.locks import Lock
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.executor import FastPaths
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.runtime.specialization import USES, Specialization

logger = logging.getLogger(__name__)


class Specializations:
    """The specialisations for samples and for signatures that calls have compiled.

    - ``known``: the specialisations; the tuple is replaced when one is added or dropped.
    - ``dropped``: the number of specialisations and entries that were dropped.

    Args:
        most: the limit of specialisations, and of entries in each mode.
        paths: the fast paths, which are dropped with code.
    """

    def __init__(self, most: int, paths: FastPaths) -> None:
        self.most = most
        self.known: tuple[Specialization, ...] = ()
        self.dropped = 0
        self.paths = paths
        self._retired_calls = 0
        self._counting = Lock()

    def add(self, specialization: Specialization) -> None:
        """Keep ``specialization``; above the limit, drop the least recently used ones."""
        self.paths.note_uses()
        with self._counting:
            specialization.last_use = next(USES)
            kept = sorted((*self.known, specialization), key=lambda s: s.last_use)
            excess = max(0, len(kept) - self.most)
            self.known = tuple(kept[excess:])
            self.dropped += excess
        for dropped in kept[:excess]:
            self.retire(entry for _, entry in dropped.compiled())
            logger.info("dropped the specialisation %s, not used for longest", dropped.signature)

    def keep(self, specialization: Specialization, mode: Mode, entry: CompiledEntry) -> None:
        """Keep ``entry`` of ``specialization``; above the limit, drop the least recently used."""
        dropped = specialization.add(mode, entry, self.most)
        if dropped:
            with self._counting:
                self.dropped += len(dropped)
            self.retire(dropped)

    def retire(self, entries: Iterable[CompiledEntry]) -> None:
        """Add the calls of entries that are no longer kept to the total; drop all fast paths."""
        self.paths.forget()
        with self._counting:
            self._retired_calls += sum(entry.calls for entry in entries)

    def served(self, present: Iterable[Specialization]) -> int:
        """Return how many calls code that was dropped, and that of ``present`` ones, served."""
        return sum(e.calls for s in present for _, e in s.compiled()) + self._retired_calls

    def drop_outdated(self) -> None:
        """Drop code whose frozen weights have changed since, together with their packed form."""
        for specialization in self.known:
            for _, entry in specialization.compiled():
                if entry.frozen is not None and entry.frozen.changed(entry.state.tensors()):
                    specialization.remove(entry)
                    self.retire([entry])
        self.known = tuple(s for s in self.known if s.compiled())
        self.paths.forget()

"""Any size: calls whose arguments have other sizes than a sample's are served by symbolic code.

A :class:`Family` is a shape class: a signature in which some dimensions are symbols. It has
symbolic code for each mode. Each combination of sizes that calls have gets a specialisation of its
own, an instance, with its own guards, counters and converted parameters. All instances share the
executable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tvmbridge.core.errors import BridgeError, BuildError
from tvmbridge.core.reasons import Reason
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.family import Family, RefusedGuessError, Retire
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.runtime.guards.signature import Matched
from tvmbridge.runtime.single_sizes import SingleSizes
from tvmbridge.runtime.specialization import Specialization
from tvmbridge.symbolic.symbols import Symbols

logger = logging.getLogger(__name__)

# The most shape classes of one signature: calls may add symbolic dimensions this many times.
_MOST_FAMILIES = 4


class AnySize:
    """The shape classes of a dispatched module.

    Args:
        compiler: the compiler of the module.
        retire: called with the entries that are no longer kept.
    """

    def __init__(self, compiler: Compiler, retire: Retire) -> None:
        self.compiler = compiler
        self.retire = retire
        self.families: list[Family] = []
        self.single = SingleSizes(retire)
        self._guesses = True
        self._lock = threading.Lock()

    def renewed(self, compiler: Compiler, retire: Retire) -> AnySize:
        """Return an object with the same rules and no code, for a copy or a forked process."""
        return AnySize(compiler, retire)

    def specialization(
        self,
        known: Sequence[Specialization],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Specialization | Reason | None:
        """Return the specialisation for a call whose sizes none of ``known`` has.

        Returns:
            The specialisation; a mismatch if the sizes are not allowed; None if the call differs
            in more than sizes.
        """
        with self._lock:
            return self._of_family(args, kwargs) or self._of_new_family(known, args, kwargs)

    def entry(
        self, specialization: Specialization, mode: Mode, matched: Matched
    ) -> CompiledEntry | None:
        """Return symbolic code for a call that belongs to ``specialization``.

        Return None if the call needs code for its own sizes: it has a sample's sizes, or there
        is no symbolic code. After calls of other sizes, the sample's next mode is compiled with
        symbols at once.

        Raises:
            RefusedGuessError: a symbol was added for the batch's rows, and the compilation failed.
            NoRoomError: there is no symbolic code, and more frequent sizes have code of their own.
        """
        if specialization.family is not None:
            try:
                return specialization.family(mode, matched)
            except RefusedGuessError:
                raise
            except BuildError as error:
                few = max((family.few for family in self.families), default=0)
                self.single.admit(specialization, str(error), few)
                return None
        for family in (f for f in self.families if f.signature is specialization.signature):
            point = None if family.refused else family.symbols.point(matched.leaves)
            if point is None:
                continue
            try:
                return family.entry(point, mode, matched)
            except BridgeError as error:
                logger.debug("a sample has code of its own: %s", error)
        return None

    def instances(self) -> list[Specialization]:
        """Return all specialisations for calls of other sizes than a sample's."""
        with self._lock:
            return [i for family in self.families for i in family.instances.values()]

    def _of_family(self, args: Any, kwargs: Any) -> Specialization | None:
        for family in self.families:
            if family.refused:
                continue
            matched = family.signature.match(args, kwargs, any_size=True)
            found = None if isinstance(matched, Reason) else family.instance(matched)
            if found is not None:
                return found
        return None

    def _of_new_family(
        self, known: Sequence[Specialization], args: Any, kwargs: Any
    ) -> Specialization | None:
        for specialization in known:
            signature = specialization.signature
            matched = signature.match(args, kwargs, any_size=True)
            if isinstance(matched, Reason):
                continue
            earlier = [f for f in self.families if f.signature is signature]
            if len(earlier) >= _MOST_FAMILIES:
                continue
            shapes = [(i, tuple(matched.leaves[i].shape)) for i, *_ in signature.tensors]
            sample = [(i, tuple(shape)) for i, shape, *_ in signature.tensors]
            calls = [sample, *(f.shapes for f in earlier), shapes]
            symbols = Symbols.of(*calls)
            if symbols is None or not symbols.dimensions:
                continue
            # A symbol for the rows saves a compilation when an epoch's last batch has fewer.
            self._guesses &= not any(f.refused for f in earlier)
            guessed = symbols.with_rows(shapes) if self._guesses else None
            symbols = guessed or symbols
            seen = [symbols.point_of(dict(call)) for call in calls]
            family = Family(self.compiler, signature, symbols, seen, shapes, self.retire)
            family.guessed = guessed is not None
            found = family.instance(matched)
            if found is not None:
                for _, entry in specialization.compiled():
                    entry.compiled.compile_no_more()
                self.families = [*(f for f in self.families if f not in earlier), family]
                instances = [i for f in earlier for i in f.instances.values()]
                self.retire(entry for i in instances for _, entry in i.compiled())
                return found
        return None

"""Room: limits on the code that calls compile, beyond the samples of ``add_tvm_dispatch``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from tvmbridge.core.options import CompileOptions
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.guards.spelling import CONSTANT, Mismatch

# Limits on signatures that calls compile: four in all, of which two may differ in a Python
# constant alone, since each value of a number is another signature.
_MOST_AT_CALLS = 4
_MOST_VALUES = 2
# How often calls may compile because the module has changed, for each reason.
_MOST_STATES = 8


class Room:
    """Decides whether a call may compile code for its arguments or for a changed module.

    Args:
        options: options of the compilation.
    """

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        # The number of calls whose code did not fit the changed module, by the reason.
        self._outgrown: Counter[str] = Counter()
        self._counting = threading.Lock()

    def is_left(
        self,
        outgrown: CompiledEntry | None,
        why: str | Mismatch | None,
        misfits: Sequence[Mismatch],
    ) -> bool:
        """Whether a call may compile code.

        Args:
            outgrown: the entry for the call's arguments, if it does not fit the changed module;
                None: no entry is for these arguments.
            why: why no code serves the call.
            misfits: the mismatch with each signature that has code.
        """
        if outgrown is None:
            return not isinstance(why, str) and self._is_left_for_signatures(misfits)
        if self._options.freeze or not isinstance(why, str):
            return False
        by_number = outgrown.state.outgrown()
        if by_number is None:
            return False
        with self._counting:
            self._outgrown[why] += 1
            return self._outgrown[why] <= (_MOST_VALUES if by_number else _MOST_STATES)

    def _is_left_for_signatures(self, misfits: Sequence[Mismatch]) -> bool:
        most = min(_MOST_AT_CALLS, self._options.max_specializations)
        return len(misfits) < most and sum(m.reason == CONSTANT for m in misfits) < _MOST_VALUES

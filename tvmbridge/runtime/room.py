"""Room: how much code calls may have compiled that nobody asked for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from tvmbridge.core.options import CompileOptions
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.guards.spelling import CONSTANT, Mismatch

# So many signatures calls may have compiled, where no sample was given; of a number that changes
# fewer, since each of its values is a signature.
_MOST_AT_CALLS = 4
_MOST_VALUES = 2
# So often calls may have compiled because the module is otherwise, for one reason.
_MOST_STATES = 8


class Room:
    """Decides whether a call may add code for its arguments, or for the module as it is now.

    options: those that the code is compiled with.
    """

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        # Calls that the module had outgrown the code for, by the reason.
        self._outgrown: Counter[str] = Counter()
        self._counting = threading.Lock()

    def is_left(
        self,
        outgrown: CompiledEntry | None,
        why: str | Mismatch | None,
        misfits: Sequence[Mismatch],
    ) -> bool:
        """Whether a call may add code.

        Args:
            outgrown: code for its arguments, which it does not fit otherwise; None: there is none.
            why: the reason.
            misfits: why it fits none of the signatures that there are.
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

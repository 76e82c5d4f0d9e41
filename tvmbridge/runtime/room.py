"""Room: limits on the code that calls compile, beyond the samples of ``add_tvm_dispatch``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from tvmbridge.core.options import CompileOptions
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.runtime.entry import CompiledEntry

# Limits on signatures that calls compile: four in all, of which two may differ in a Python
# constant alone, since each value of a number is another signature.
_MOST_AT_CALLS = 4
_MOST_VALUES = 2
# How often calls may compile because the module has changed, for each reason.
_MOST_STATES = 8
# A number in an attribute that changes so rarely counts as any other change of the module.
_RARELY = 16


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
        why: Reason | None,
        misfits: Sequence[Reason],
    ) -> bool:
        """Whether a call may compile code.

        Args:
            outgrown: the entry for the call's arguments, if it does not fit the changed module;
                None: no entry is for these arguments.
            why: why the code of a known signature does not serve the call; None: there is none.
            misfits: the mismatch with each signature that has code.
        """
        if outgrown is None:
            return why is None and self._is_left_for_signatures(misfits)
        if self._options.freeze or why is None:
            return False
        by_number = outgrown.state.outgrown()
        if by_number is None:
            return False
        often = by_number and outgrown.calls < _RARELY
        with self._counting:
            self._outgrown[why.text] += 1
            return self._outgrown[why.text] <= (_MOST_VALUES if often else _MOST_STATES)

    def _is_left_for_signatures(self, misfits: Sequence[Reason]) -> bool:
        most = min(_MOST_AT_CALLS, self._options.max_specializations)
        return len(misfits) < most and sum(m.kind is Kind.CONSTANT for m in misfits) < _MOST_VALUES

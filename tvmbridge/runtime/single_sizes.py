"""Single sizes: code for the sizes of some calls, where there is no symbolic code for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from tvmbridge.core.errors import BuildError
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.specialization import Specialization

# With the sample's size this makes four signatures, the limit for calls without symbols as well.
_MOST = 3
# Where forward permits few sizes, each may have code of its own up to this number.
_MOST_OF_FEW = 16
# A size without code must have this many times the calls of the least used one to replace it.
# Sizes that come equally often then never replace each other, which would compile again and again.
_AS_OFTEN = 2


class NoRoomError(BuildError):
    """The maximum number of single sizes has code, and this size is not among them."""


class SingleSizes:
    """The specialisations with code for one size each; the most called ones keep their code.

    Args:
        retire: called with the entries that are no longer kept.
    """

    def __init__(self, retire: Callable[[Iterable[CompiledEntry]], None]) -> None:
        self._retire = retire
        self._kept: list[Specialization] = []
        self._refused: WeakKeyDictionary[Specialization, int] = WeakKeyDictionary()

    def admit(self, specialization: Specialization, reason: str, few: int = 0) -> None:
        """Let ``specialization`` have code for its size; drop the least used one if needed.

        Args:
            reason: why there is no symbolic code for it, for the error.
            few: the number of sizes that calls may have; 0: there are many.

        Raises:
            NoRoomError: the other sizes are called more often.
        """
        if specialization in self._kept:
            return
        most = max(_MOST, min(few, _MOST_OF_FEW))
        if len(self._kept) >= most:
            if self._refused.setdefault(specialization, 0) < self._least_calls():
                raise NoRoomError(f"{reason}; {most} other sizes have code of their own")
            least = min(self._kept, key=_served)
            self._kept.remove(least)
            self._retire([entry for _, entry in least.compiled()])
            least.entries.clear()
        self._refused.pop(specialization, None)
        self._kept.append(specialization)

    def is_due(self, specialization: Specialization) -> bool:
        """Count a call of a size that had no room; return whether it may be admitted now."""
        if specialization not in self._refused:
            return False
        self._refused[specialization] += 1
        return self._refused[specialization] >= self._least_calls()

    def _least_calls(self) -> int:
        """Return how many calls a size without code must have had to take another's place."""
        return _AS_OFTEN * max(min(map(_served, self._kept), default=0), 1)


def _served(specialization: Specialization) -> int:
    """Return how many calls the code of ``specialization`` has served."""
    return sum(entry.calls for _, entry in specialization.compiled())

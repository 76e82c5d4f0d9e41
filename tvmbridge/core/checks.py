"""Which calls are compared with eager PyTorch, by the option ``check`` or ``TVMBRIDGE_CHECK``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

VARIABLE = "TVMBRIDGE_CHECK"

_WORDS = ("never", "first", "growing", "always")
_SHORT = {"": "never", "0": "never", "1": "growing"}
_EVERY = re.compile(r"every:([1-9][0-9]*)")


@dataclass(frozen=True)
class CheckPolicy:
    """Decides which calls of each specialisation and mode are compared with eager PyTorch.

    Args:
        word: ``"never"``; ``"first"``, the first call alone; ``"growing"``, calls 1, 2, 4, 8 and so
            on; ``"every:N"``, calls 1, N + 1, 2 N + 1 and so on; ``"always"``.

    Raises:
        ValueError: ``word`` is none of these.
    """

    word: str = "never"

    def __post_init__(self) -> None:
        if self.word in _WORDS:
            return
        if not isinstance(self.word, str) or not _EVERY.fullmatch(self.word):
            raise ValueError(
                f"no calls are called {self.word!r}; choose one of {', '.join(_WORDS)}, or "
                "'every:N' for each N-th call"
            )

    @classmethod
    def of_now(cls, word: str) -> CheckPolicy:
        """Return the policy of ``TVMBRIDGE_CHECK`` or, if it is not set, the policy ``word``.

        The environment variable takes the same words; 1 is ``growing`` and 0 is ``never``.

        Raises:
            ValueError: the variable has another value.
        """
        named = os.environ.get(VARIABLE)
        if named is None:
            return cls(word)
        try:
            return cls(_SHORT.get(named, named))
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}, 1 for growing or 0 for never") from None

    def due(self, call: int) -> bool:
        """Whether the call with this number is checked; the first call has number 1."""
        if self.word in ("never", "always"):
            return self.word == "always"
        if self.word == "first":
            return call == 1
        if self.word == "growing":
            return call & (call - 1) == 0
        return (call - 1) % int(self.word.removeprefix("every:")) == 0

"""The verdict of a speed trial: the times of compiled code and of the module's own forward."""

from __future__ import annotations

import math
from typing import NamedTuple

# Compiled code may take this many times the own forward's time before it is replaced.
_SLOWER = 1.03


class SpeedVerdict(NamedTuple):
    """Median seconds of a call by compiled code and by the module's own forward.

    In training the seconds include those of the backward pass. ``own`` is None for calls so long
    that the module's own forward was not timed.
    """

    compiled: float
    own: float | None

    @property
    def pays(self) -> bool:
        """Whether compiled code is fast enough to serve the calls."""
        return self.own is None or self.compiled <= _SLOWER * self.own

    @classmethod
    def parsed(cls, text: str) -> SpeedVerdict | None:
        """Parse a verdict from the text that ``str()`` returns; None for any other text."""
        try:
            compiled, own = map(float, text.split())
        except ValueError:
            return None
        valid = all(math.isfinite(s) and s > 0 for s in (compiled, own))
        return cls(compiled, own) if valid else None

    def __str__(self) -> str:
        return f"{self.compiled!r} {self.own!r}"

    def text(self) -> str:
        """Return a sentence with both times and the side that serves the calls."""
        if self.own is None:
            return (
                f"a call takes {_shown(self.compiled)} by compiled code: too long to have calls "
                "served by the module's own forward to time it"
            )
        serves = "compiled code" if self.pays else "the module's own forward"
        return (
            f"a call takes {_shown(self.compiled)} by compiled code and {_shown(self.own)} by the "
            f"module's own forward, so {serves} serves"
        )


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"

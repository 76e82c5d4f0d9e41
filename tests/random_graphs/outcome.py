"""What comes of a program."""

from __future__ import annotations

import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    ``result`` is *right*, *refused*, *wrong* or *error*; *invalid* where eager PyTorch raises;
    *overflown* where it is not right, but finite numbers overflow on the way. In the parent *crash*
    and *timeout* come to that.
    """

    result: str
    reason: str = ""
    joint: str = ""
    seconds: float = 0.0


def text_of(error: BaseException) -> str:
    """An error with the places that it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = "; ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in frames)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]} ({places})"

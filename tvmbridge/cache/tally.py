"""How much of the code of this process came from disk, for the line that shows progress."""

from __future__ import annotations

from collections import Counter

_codes: Counter[bool] = Counter()


def count_code(from_disk: bool) -> None:
    """Count a piece of code that was loaded, or else compiled."""
    _codes[from_disk] += 1


def disk_text() -> str:
    """``3 of 4 from disk``; empty before there is any code."""
    total = _codes.total()
    return f"{_codes[True]} of {total} from disk" if total else ""

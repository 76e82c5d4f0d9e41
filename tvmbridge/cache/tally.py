"""Count how much code of this process came from the cache on disk, for the progress line."""

from __future__ import annotations

from collections import Counter

_codes: Counter[bool] = Counter()


def count_code(from_disk: bool) -> None:
    """Count one piece of code as loaded from disk, or as compiled."""
    _codes[from_disk] += 1


def disk_text() -> str:
    """Return a text such as ``3 of 4 from disk``, or "" before any code was counted."""
    total = _codes.total()
    return f"{_codes[True]} of {total} from disk" if total else ""

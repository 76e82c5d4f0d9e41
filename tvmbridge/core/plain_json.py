"""Parse JSON from files that may be damaged, with limits on the nesting and number of values."""

from __future__ import annotations

import json
from typing import Any

MOST_NESTED = 16
# A value may take three bytes as text, and takes about a hundred as a Python object.
MOST_VALUES = 2**16


def parse_json(text: bytes, most_values: int = MOST_VALUES) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text; it is not parsed if it could have more than ``most_values`` values.

    Raises:
        ValueError: the text is damaged, too large, or nested deeper than ``MOST_NESTED`` levels.
    """
    if count_values(text) > most_values:
        raise ValueError(f"it has more than {most_values} values")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not _is_flat(value, MOST_NESTED):
        raise ValueError("it is nested too deep")
    return value


def count_values(text: bytes, start: int = 0, end: int | None = None) -> int:
    """Return an upper bound for the number of values in the JSON ``text[start:end]``."""
    return 1 + sum(text.count(mark, start, end) for mark in (b",", b"[", b"{", b":"))


def _is_flat(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)

"""JSON from files that somebody may have damaged: bounded in depth and in values."""

from __future__ import annotations

import json
from typing import Any

MOST_NESTED = 16
# A value takes about a hundred bytes as an object of Python, and three as text.
MOST_VALUES = 2**16


def parse_json(text: bytes, most_values: int = MOST_VALUES) -> Any:
    """The value of a JSON text.

    Args:
        text: the text; it is not parsed where it may have more than ``most_values`` values.
        most_values: how many values it may have, a key of an object being one.

    Raises:
        ValueError: it is damaged, too large, or nested deeper than anything that is written here.
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
    """At most how many values the JSON between two places of ``text`` has."""
    return 1 + sum(text.count(mark, start, end) for mark in (b",", b"[", b"{", b":"))


def _is_flat(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)

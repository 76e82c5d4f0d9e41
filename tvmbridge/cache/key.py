"""The key of compiled code: named entries, so that a miss can name the entries that differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheKey:
    """All that compiled code depends on.

    - ``entries``: texts by name; a long text is replaced by its digest.
    """

    entries: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the entries, which names the file of the code."""
        text = json.dumps(dict(self.entries), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differing(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the entries that differ from those of ``other``, in order."""
        names = dict.fromkeys((*self.entries, *other))
        return tuple(n for n in names if self.entries.get(n) != other.get(n))


def digest_of(content: str | bytes) -> str:
    """Return the SHA-256 digest that replaces a long text in a key."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()

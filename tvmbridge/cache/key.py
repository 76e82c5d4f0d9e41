"""The key of compiled code: named entries, so that a miss can say which of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheKey:
    """All that code depends on; ``entries`` are texts by name, long ones as digests."""

    entries: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The name under which code with this key is kept."""
        text = json.dumps(dict(self.entries), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differing(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the entries in which ``other`` is not the same, in order."""
        names = dict.fromkeys((*self.entries, *other))
        return tuple(n for n in names if self.entries.get(n) != other.get(n))


def digest_of(content: str | bytes) -> str:
    """What stands for a long text in a key."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()

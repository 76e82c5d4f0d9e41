"""The cache on disk: compiled code that later processes can load."""

from __future__ import annotations

from tvmbridge.cache.key import CacheKey
from tvmbridge.cache.store import Kept, Store

__all__ = ["CacheKey", "Kept", "Store"]

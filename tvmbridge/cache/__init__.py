"""The cache on disk: compiled code for the processes that come after this one."""

from __future__ import annotations

from tvmbridge.cache.key import CacheKey
from tvmbridge.cache.store import Kept, Store

__all__ = ["CacheKey", "Kept", "Store"]

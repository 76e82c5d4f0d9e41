"""A lock for ``with`` statements that a profiling function cannot leave locked.

CPython reports the call of a lock's own ``__exit__`` to the function of ``sys.setprofile``. If that
function raises, the call is not made, and the lock stays locked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any


class Lock:
    """A lock that its thread may enter again. Generators may be dropped, and must not hold it."""

    __slots__ = ("__enter__", "__exit__")
    __enter__: Callable[..., Any]
    __exit__: Callable[..., Any]

    def __init__(self) -> None:
        lock = threading.RLock()
        self.__enter__ = partial(lock.__enter__)
        self.__exit__ = partial(lock.__exit__)

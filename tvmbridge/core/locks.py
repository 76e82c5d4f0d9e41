"""A lock for ``with`` statements that a profiling function cannot leave locked.

At the end of a ``with`` block CPython reports the call of a builtin ``__exit__`` to the function of
``sys.setprofile``. If that function raises, the call is not made, the lock stays locked, and all
later calls wait forever. CPython does not report a call of a ``functools.partial``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any


class Lock:
    """A lock; with ``reentrant``, a thread that holds it may enter it again."""

    __slots__ = ("__enter__", "__exit__")
    __enter__: Callable[..., Any]
    __exit__: Callable[..., Any]

    def __init__(self, *, reentrant: bool = False) -> None:
        lock = threading.RLock() if reentrant else threading.Lock()
        self.__enter__ = partial(lock.__enter__)
        self.__exit__ = partial(lock.__exit__)

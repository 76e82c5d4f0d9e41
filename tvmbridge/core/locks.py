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
    """A lock; with ``reentrant``, a thread that holds it may enter it again.

    With ``over``, it is this ``threading.RLock``, which others may use too.
    """

    __slots__ = ("__enter__", "__exit__", "_lock")
    __enter__: Callable[..., Any]
    __exit__: Callable[..., Any]

    def __init__(self, *, reentrant: bool = False, over: Any = None) -> None:
        self._lock: Any = over or (threading.RLock() if reentrant else threading.Lock())
        self.__enter__ = partial(self._lock.__enter__)
        self.__exit__ = partial(self._lock.__exit__)

    def held_elsewhere(self) -> bool:
        """Whether another thread holds this lock, which is reentrant.

        An attempt to acquire it would leave it held if an exception were raised in between.
        """
        return not self._lock._is_owned() and repr(self._lock).startswith("<locked")

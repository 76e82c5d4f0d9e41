"""Put off full garbage collections while much is allocated that stays alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvmbridge.core.locks import Lock

_NEVER = 10**6


@dataclass
class _PutOff:
    """The thresholds before the first of the contexts that are entered, in all threads."""

    users: int = 0
    before: tuple[int, int, int] = (0, 0, 0)


_LOCK = Lock()
_put_off = _PutOff()


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Start no full garbage collection within the context; collect young objects as before.

    A compilation allocates millions of objects, so that Python looks at all objects of the process
    several times. This takes a tenth of the compilation.
    """
    with _LOCK:
        if not _put_off.users:
            _put_off.before = gc.get_threshold()
            gc.set_threshold(*_put_off.before[:2], _NEVER)
        _put_off.users += 1
    try:
        yield
    finally:
        with _LOCK:
            _put_off.users -= 1
            if not _put_off.users and gc.get_threshold() == (*_put_off.before[:2], _NEVER):
                gc.set_threshold(*_put_off.before)

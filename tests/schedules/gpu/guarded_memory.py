"""Memory of arrays between pages without access."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_MARGIN = 1 << 20
# The widest vector of a thread in bytes: arrays begin at a multiple of it.
_ALIGNMENT = 16
UNUSED = 0xFF


class Room:
    """The memory of an array beside pages without access, which detect accesses outside of it.

    The array begins behind such pages, or ends before them (``at_end``). The rest of its own pages
    has known bytes, which detect writes.
    """

    def __init__(self, data: bytes, *, at_end: bool) -> None:
        self._size = len(data)
        pages = -(-max(self._size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, pages + 2 * _MARGIN)
        whole = np.frombuffer(self._memory, np.uint8)
        self._pages = whole[_MARGIN : _MARGIN + pages]
        for edge in (0, _MARGIN + pages):
            _forbid(whole.ctypes.data + edge)
        self._start = pages - -(-self._size // _ALIGNMENT) * _ALIGNMENT if at_end else 0
        self.address = self._pages.ctypes.data + self._start
        self._pages[:] = UNUSED
        self._pages[self._start : self._start + self._size] = np.frombuffer(data, np.uint8)

    def contents(self) -> bytes:
        end = self._start + self._size
        beside = (self._pages[: self._start], self._pages[end:])
        assert all((part == UNUSED).all() for part in beside), "a write beside an array"
        return self._pages[self._start : end].tobytes()


def _forbid(address: int) -> None:
    """Forbid all access to the margin at ``address``."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_MARGIN), 0)
    assert not failed, ctypes.get_errno()

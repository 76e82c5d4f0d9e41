"""Neighbouring elements of one GPU thread: read and write contiguous memory as vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad

from tvmbridge.schedules.gpu.threads import allocate_in
from tvmbridge.schedules.indexing import Indexer, index_var, integer
from tvmbridge.schedules.loops import load, loop, sequence, store, vector_loop
from tvmbridge.schedules.reader import Buffer, is_if

# The widest access of a thread in bytes, and the bytes of dtypes; bool is not accessed as vectors.
_WIDEST = 16
_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2}
_BYTES |= {"float32": 4, "int32": 4, "uint32": 4, "float64": 8, "int64": 8, "uint64": 8}


def lanes_for(dtypes: Iterable[str], total: int, threads: int) -> int:
    """Return the number of neighbouring elements for a thread, a power of two dividing ``total``.

    The smallest dtype fills the widest access, unless fewer than ``threads`` threads would have
    elements.
    """
    lanes = max((_WIDEST // _BYTES[d] for d in dtypes if d in _BYTES), default=1)
    lanes = gcd(lanes, total)
    while lanes > 1 and total // lanes < threads:
        lanes //= 2
    return lanes


def side_by_side(
    indexer: Indexer,
    lanes: int,
    position: Expr,
    element: Callable[[Expr, Expr], list[tirx.Stmt]],
) -> list[tirx.Stmt]:
    """Return the statements ``element(position + i, i)`` for each ``i`` below ``lanes``.

    ``position`` must be a multiple of ``lanes``. Aligned contiguous reads move before the loop, as
    vector loads; such writes move after it. Reads inside a conditional expression or statement
    stay, because they may be out of bounds.
    """
    lane = index_var("lane")
    indexer.bind(lane, lanes)
    body = element(indexer.simplify(position + lane), lane)
    mover = _Mover(indexer, lane, lanes, body)
    body = [mover.moved(statement) for statement in body]
    each = tirx.For(lane, integer(0), integer(lanes), tirx.ForKind.UNROLLED, sequence(body))
    return [*mover.before, each, *mover.behind]


class _Mover:
    """Moves accesses to ``lanes`` contiguous elements out of the loop over the elements.

    - ``before``: the vector loads, to run before the loop.
    - ``behind``: the vector stores, to run after the loop.
    """

    def __init__(
        self, indexer: Indexer, lane: tirx.Var, lanes: int, body: Sequence[tirx.Stmt]
    ) -> None:
        self.indexer, self.lane, self.lanes = indexer, lane, lanes
        self.before: list[tirx.Stmt] = []
        self.behind: list[tirx.Stmt] = []
        self._written = {s.buffer for s in body if isinstance(s, tirx.BufferStore)}
        self._read: list[tuple[Buffer, Expr, Buffer]] = []

    def moved(self, statement: tirx.Stmt) -> tirx.Stmt:
        """Return ``statement`` with vector elements in place of accesses that were moved."""
        handlers = [
            (TensorLoad, self._load),
            (Call, _unless_choice),
            ((tirx.Select, tirx.IfThenElse), _kept),
        ]
        statement = tvm_ffi.structural_mutate(statement, handlers)
        if not isinstance(statement, tirx.BufferStore):
            return statement
        start = self._start(statement.buffer, statement.indices)
        if start is None:
            return statement
        local, room = self._room(statement.buffer)
        self.before.append(room)
        self.behind.append(self._copy(statement.buffer, start, local, out=True))
        return store(local, statement.value, self.lane)

    def _load(self, node: Any, mutator: Any) -> Expr:
        if node.source in self._written:
            return mutator.default_mutate(node)
        start = self._start(node.source, node.indices)
        if start is None:
            return mutator.default_mutate(node)
        for buffer, at, local in self._read:
            if buffer.same_as(node.source) and tvm_ffi.structural_equal(at, start):
                return load(local, self.lane)
        local, room = self._room(node.source)
        self._read.append((node.source, start, local))
        self.before += [room, self._copy(node.source, start, local, out=False)]
        return load(local, self.lane)

    def _room(self, buffer: Buffer) -> tuple[Buffer, tirx.Stmt]:
        return allocate_in("local", self.lanes, str(buffer.dtype), f"{buffer.name}_lanes")

    def _start(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr | None:
        """Return the offset of the first of the lanes' contiguous elements in global memory.

        None if the access is not contiguous over lanes, is not aligned, or is not to global memory.
        """
        dtype = str(buffer.dtype)
        if buffer.scope() != "global" or dtype not in _BYTES or not indices:
            return None
        start = self.indexer.start_of(indices[-1], self.lane)
        if start is None or not self.indexer.is_multiple(start, self._width(dtype)):
            return None
        return start

    def _width(self, dtype: str) -> int:
        return min(self.lanes, _WIDEST // _BYTES[dtype])

    def _copy(self, buffer: Buffer, start: Expr, local: Buffer, *, out: bool) -> tirx.Stmt:
        width = self._width(str(buffer.dtype))
        zeros = [integer(0)] * (len(buffer.shape) - 1)

        def vector(number: Expr) -> list[tirx.Stmt]:
            first = number * integer(width)

            def one(i: Expr) -> list[tirx.Stmt]:
                there = [*zeros, start + first + i]
                if out:
                    return [store(buffer, load(local, first + i), *there)]
                return [store(local, load(buffer, *there), first + i)]

            return [vector_loop(width, one)]

        return loop(self.lanes // width, vector, tirx.ForKind.UNROLLED)


def _unless_choice(node: Call, mutator: Any) -> Expr:
    return node if is_if(node) else mutator.default_mutate(node)


def _kept(node: Expr, _: Any) -> Expr:
    return node

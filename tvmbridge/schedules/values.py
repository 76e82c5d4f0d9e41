"""Evaluation on demand: express an element of a stage by elements that are in memory.

A stage that is not stored is computed at its reads, once for every distinct index. The results are
bound to variables, so that two reads of one element share the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad

from tvmbridge.schedules import bfloat16
from tvmbridge.schedules.indexing import Indexer, integer
from tvmbridge.schedules.kernel import Kernel, KernelStage
from tvmbridge.schedules.reader import (
    Buffer,
    chooses,
    fresh_lets,
    is_if,
    mentions,
    substitute,
    variables,
)

Indices = tuple[Expr, ...]

# With more variables in one loop body, a function is not scheduled.
_LARGEST = 5000
# TVM's simplifier takes twice as long for each variable that is bound within an expression: 12 s
# for 29 of them.
_MANY_LETS = 18


class TooLargeError(ValueError):
    """The loop body of a function would be too large to compile in reasonable time."""


@dataclass(frozen=True)
class Lane:
    """A position in a vector loop.

    - ``index``: the lane; 0 outside of vector loops.
    - ``count``: the number of lanes; 1 outside of vector loops.
    """

    index: Expr
    count: int


_SCALAR = Lane(integer(0), 1)


class Memory:
    """Access to the buffers of a function by row-major offset.

    The offset is the last index, and all other indices are zero. Buffers are compact, so flattening
    restores the offset. (One-dimensional views would be clearer, but TVM's legalisation of bfloat16
    loses views of parameters.)

    - ``cells``: the storage scope of single values.
    - ``allocations``: the statements that allocate intermediate buffers.
    """

    def __init__(self, cells: str = "global") -> None:
        self.cells = cells
        self.allocations: list[tirx.Stmt] = []
        self._flat: dict[Any, Buffer] = {}

    def allocate(self, buffer: Buffer) -> None:
        """Allocate an intermediate buffer; a bfloat16 buffer holds its bits as uint16.

        TVM's legalisation of bfloat16 loses allocations that a conditional expression reads.
        """
        size = integer(prod(int(extent) for extent in buffer.shape))
        kept = bfloat16.stored_as(str(buffer.dtype))
        self._flat[buffer] = tirx.decl_buffer([size], kept, buffer.name)
        self.allocations.append(tirx.AllocBuffer(self._flat[buffer]))

    def holds(self, buffer: Buffer) -> bool:
        """Whether :meth:`allocate` was called for ``buffer``."""
        return buffer in self._flat

    def load(self, buffer: Buffer, offset: Expr) -> Expr:
        """Return the element of ``buffer`` at a row-major offset."""
        target = self._flat.get(buffer, buffer)
        element = tirx.BufferLoad(target, _last(target, offset))
        return bfloat16.from_memory(element, str(buffer.dtype))

    def store(self, buffer: Buffer, offset: Expr, value: Expr) -> tirx.Stmt:
        """Return the statement that writes the element of ``buffer`` at a row-major offset."""
        element = bfloat16.to_memory(value, str(buffer.dtype), self.dtype(buffer))
        return self.put(buffer, offset, element)

    def dtype(self, buffer: Buffer) -> str:
        """Return the dtype of ``buffer`` in memory."""
        target: Buffer = self._flat.get(buffer, buffer)
        return str(target.dtype)

    def put(self, buffer: Buffer, offset: Expr, element: Expr) -> tirx.Stmt:
        """Return the statement that writes an element given in the dtype of memory."""
        target: Buffer = self._flat.get(buffer, buffer)
        return tirx.BufferStore(target, element, _last(target, offset))


def _last(buffer: Buffer, offset: Expr) -> list[Expr]:
    zeros: list[Expr] = [integer(0)] * (len(buffer.shape) - 1)
    return [*zeros, offset] if buffer.shape else []


class Evaluator:
    """Builds the statements and the expression for elements of stages at given indices.

    - ``stored``: the buffers whose results are stored.
    - ``lane``: the position in the vector loop that is generated.
    - ``cells``: the statements that allocate single values.
    - ``places``: redirects reads of a buffer, for example to a local row or to a scalar.
    - ``statements``: the statements built so far.
    """

    def __init__(
        self,
        kernel: Kernel,
        stored: set[Any],
        indexer: Indexer,
        memory: Memory,
        lane: Lane = _SCALAR,
    ) -> None:
        self.kernel, self.stored, self.indexer, self.memory = kernel, stored, indexer, memory
        self.lane = lane
        self.cells: list[tirx.Stmt] = []
        self.places: dict[Any, Callable[[Expr], Expr]] = {}
        self.statements: list[tirx.Stmt] = []
        self._known: dict[tuple[Any, int], list[tuple[Expr, Expr]]] = {}

    def element(self, stage: KernelStage, at: Mapping[Any, Expr]) -> Expr:
        """Return the element of ``stage`` at the axis values ``at``, before any reduction."""
        if self._chooses_computations(stage):
            return self._chosen(stage, at)
        values: dict[Any, Expr] = dict(at)
        for load in stage.loads:
            read = self._guarded if load.guarded else self.load
            values[load.slot] = read(load.buffer, self._indices(load.indices, values))
        for var, value in stage.binds:
            values[var] = self.name(substitute(value, values), var.name)
        value = substitute(stage.value, values)
        return self._decided(value) if stage.guards else value

    def _chooses_computations(self, stage: KernelStage) -> bool:
        """Whether ``stage`` chooses, in scalar code, between values of which one is computed here.

        Each choice is then a statement. TVM's passes take seconds for a choice between expressions
        that hold the computation, such as the padding of an activation; in code for the CPU if
        the computation is long.
        """
        if self.lane.count > 1 or stage.binds or not is_if(stage.value):
            return False
        guarded = [load.buffer for load in stage.loads if load.guarded]
        fewest = 1 if self.memory.cells == "local" else _MANY_LETS
        return any(self._variables_within(buffer) >= fewest for buffer in guarded)

    def _variables_within(self, buffer: Buffer) -> int:
        """Return how many variables the computation of an element of ``buffer`` binds."""
        count, left, seen = 0, [buffer], set[Any]()
        while left:
            buffer = left.pop()
            stage = None if self._lies(buffer) else self.kernel.producer(buffer)
            if stage is None or buffer in seen:
                continue
            seen.add(buffer)
            count += 1 + len(stage.binds)
            left += [load.buffer for load in stage.loads]
        return count

    def _chosen(self, stage: KernelStage, at: Mapping[Any, Expr]) -> Expr:
        """Return the element of a stage that chooses between values, by statements."""
        slots, values = {load.slot for load in stage.loads}, dict(at)
        for load in stage.loads:
            read = set().union(*(variables(index) for index in load.indices))
            if not load.guarded and read & slots <= values.keys():
                values[load.slot] = self.load(load.buffer, self._indices(load.indices, values))
        cell = self._cell("chosen", str(stage.value.ty.dtype))
        self._choose(stage, stage.value, values, cell)
        return tirx.BufferLoad(cell, [integer(0)])

    def _choose(
        self, stage: KernelStage, value: Expr, values: dict[Any, Expr], cell: Buffer
    ) -> None:
        """Add the statements that store ``value`` in ``cell``; each choice is an ``if``.

        A guarded read is evaluated in the innermost branch that contains it alone: the branches of
        a concatenation's last choice are read beyond their bounds elsewhere.
        """
        if not is_if(value):
            known = self._with_guarded(stage, value, values)
            result = self._decided(substitute(value, known))
            self.statements.append(tirx.BufferStore(cell, result, [integer(0)]))
            return
        condition, *branches = value.args
        known = self._with_guarded(stage, condition, values)
        statements = []
        for branch in branches:
            inner = self.fork()
            inner._choose(stage, branch, known, cell)
            lines = inner.take()
            statements.append(tirx.SeqStmt(lines) if len(lines) > 1 else lines[0])
        decided = self.indexer.simplify(substitute(condition, known))
        self.statements.append(tirx.IfThenElse(decided, *statements))

    def _with_guarded(
        self, stage: KernelStage, value: Expr, values: Mapping[Any, Expr]
    ) -> dict[Any, Expr]:
        """Return ``values`` and the other reads of ``value``, which is evaluated here.

        If ``value`` contains choices, its reads become parts of its expression.
        """
        needed, wanted = variables(value), []
        for load in reversed(stage.loads):
            if load.slot in needed and load.slot not in values:
                wanted.append(load)
                needed = needed.union(*(variables(index) for index in load.indices))
        known = dict(values)
        read = self._guarded if chooses(value) else self.load
        for load in reversed(wanted):
            known[load.slot] = read(load.buffer, self._indices(load.indices, known))
        return known

    def _decided(self, value: Expr) -> Expr:
        """Return ``value`` with simplified conditions.

        A condition that is the same for all columns of a row must become a scalar.
        """

        def simpler(call: Call) -> Expr:
            if not is_if(call):
                return call
            condition, *others = call.args
            return tirx.if_then_else(self.indexer.simplify(condition), *others)

        return tvm_ffi.structural_map(value, (Call, simpler))

    def name(self, value: Expr, hint: str) -> Expr:
        """Bind ``value`` to a new variable, unless it is a variable or a constant.

        A bool is not bound, because TVM's simplifier fails on a variable that is a bool vector.

        Raises:
            TooLargeError: the loop body has too many statements.
        """
        dtype = str(value.ty.dtype)
        if isinstance(value, tirx.Var | tirx.IntImm | tirx.FloatImm) or dtype == "bool":
            return value
        if len(self.statements) > _LARGEST:
            raise TooLargeError
        var = tirx.Var(hint, dtype)
        if not isinstance(value, TensorLoad):
            value = self._through_memory(value, hint, dtype)
        self.statements.append(tirx.Bind(var, value))
        return var

    def _through_memory(self, value: Expr, hint: str, dtype: str) -> Expr:
        """Store ``value`` in a memory cell and return its read; LLVM makes the cell a register.

        TVM's simplifier expands chains of bound variables, also of floats. The time grows
        exponentially with the length of a chain, and ``(x + y) - y`` becomes ``x``. The simplifier
        does not see through a read of memory.
        """
        cell = self._cell(hint, dtype)
        self.statements.append(tirx.BufferStore(cell, value, [self.lane.index]))
        return tirx.BufferLoad(cell, [self.lane.index])

    def _cell(self, hint: str, dtype: str) -> Buffer:
        """Allocate a cell for a value of each lane."""
        count, scope = [integer(self.lane.count)], self.memory.cells
        cell = tirx.decl_buffer(count, dtype, f"{hint}_cell", scope=scope)
        self.cells.append(tirx.AllocBuffer(cell))
        return cell

    def load(self, buffer: Buffer, indices: Indices) -> Expr:
        """Return the value of ``buffer[indices]``; compute it if it is not in memory."""
        offset = self.indexer.flat(buffer, indices)
        for at, value in self._known.get(_key(buffer, offset), ()):
            if tvm_ffi.structural_equal(at, offset):
                return value
        place = self.places.get(buffer)
        stage = None if self._lies(buffer) else self.kernel.producer(buffer)
        if place is not None:
            value = place(offset)
        elif stage is None:
            value = self.memory.load(buffer, offset)
        else:
            value = self.element(stage, stage.at(indices))
        named = self.name(value, "v")
        self.remember(buffer, offset, named)
        return named

    def _lies(self, buffer: Buffer) -> bool:
        """Whether ``buffer`` is in memory, and not only in a variable or local buffer."""
        if buffer not in self.stored:
            return False
        return self.memory.holds(buffer) or buffer in self.kernel.outputs

    def remember(self, buffer: Buffer, offset: Expr, value: Expr) -> None:
        """Make later reads of ``buffer`` at a row-major offset return ``value`` in this scope."""
        self._known.setdefault(_key(buffer, offset), []).append((offset, value))

    def store(self, buffer: Buffer, offset: Expr, value: Expr) -> None:
        """Add the statement that writes the element of ``buffer`` at a row-major offset."""
        if self.lane.count > 1 and self.memory.dtype(buffer) == bfloat16.NAME:
            # TVM's legalisation of bfloat16 does not support a value that is equal in all lanes.
            kept = bfloat16.stored_as(bfloat16.NAME)
            bits = self._through_memory(
                bfloat16.to_memory(value, bfloat16.NAME, kept), "bits", kept
            )
            element = tirx.reinterpret(bfloat16.NAME, bits)
            self.statements.append(self.memory.put(buffer, offset, element))
            return
        self.statements.append(self.memory.store(buffer, offset, value))

    def fork(self, lane: Lane = _SCALAR) -> Evaluator:
        """Return an evaluator for an inner scope, with its own list of statements."""
        inner = Evaluator(self.kernel, self.stored, self.indexer, self.memory, lane)
        inner.places = dict(self.places)
        return inner

    def take(self) -> list[tirx.Stmt]:
        """Return the statements built so far, and clear them."""
        statements = [*self.cells, *self.statements]
        self.cells, self.statements = [], []
        return statements

    def _indices(self, indices: Sequence[Expr], at: Mapping[Any, Expr]) -> Indices:
        return tuple(self.indexer.simplify(substitute(i, dict(at))) for i in indices)

    def _guarded(self, buffer: Buffer, indices: Indices) -> Expr:
        """Return the value of ``buffer[indices]`` where the indices may be outside of the buffer.

        It is used only if they are inside. A long computation is not guarded, but computes the
        nearest element of the buffer: as one expression it would keep TVM's simplifier for minutes.
        """
        is_empty = any(int(extent) == 0 for extent in buffer.shape)
        if is_empty or self._variables_within(buffer) < _MANY_LETS:
            return self._inline(buffer, indices)
        places = zip(indices, buffer.shape, strict=True)
        return self.load(buffer, tuple(self._nearest(i, int(n)) for i, n in places))

    def _nearest(self, index: Expr, extent: int) -> Expr:
        """Return ``index``, or the nearest to it that is in [0, extent)."""
        if self.indexer.lies_in(index, extent):
            return index
        return tirx.Max(integer(0), tirx.Min(index, integer(extent - 1)))

    def _inline(self, buffer: Buffer, indices: Indices) -> Expr:
        """Return the value of ``buffer[indices]`` as one expression, without separate statements.

        A guarded read must not be evaluated outside of its condition. Results that are only in a
        variable or a local buffer are recomputed.
        """
        lying = {b for b in self.stored if self._lies(b)}
        inner = _Inliner(self.kernel, lying, self.indexer, self.memory)
        inner.places = dict(self.places)
        inside = [inner.inside(i, int(n)) for i, n in zip(indices, buffer.shape, strict=True)]
        value = inner.load(buffer, tuple(inside))
        for var, bound in reversed(inner.bindings):
            value = tirx.Let(var, bound, value)
        for var, index in inner.positions:
            if mentions(value, var):
                value = tirx.Let(var, index, value)
        return fresh_lets(value)


class _Inliner(Evaluator):
    """An evaluator that binds variables by Let expressions, not by statements."""

    def __init__(self, kernel: Kernel, stored: set[Any], indexer: Indexer, memory: Memory) -> None:
        super().__init__(kernel, stored, indexer, memory)
        self.bindings: list[tuple[tirx.Var, Expr]] = []
        self.positions: list[tuple[tirx.Var, Expr]] = []

    def _chooses_computations(self, stage: KernelStage) -> bool:
        """An expression holds no statements."""
        return False

    def inside(self, index: Expr, extent: int) -> Expr:
        """Return a position for an index that is in [0, extent) wherever it is evaluated.

        The simplifier does not know which branch of a choice an index belongs to. It rewrites
        ``(row * 16 + column - 32) // 16`` to ``row + column // 16 - 2``, and in other ways at other
        sizes. With a position in [0, 16) for ``column - 32`` it finds ``row``.
        """
        is_known = isinstance(index, tirx.Var | tirx.IntImm) or self.indexer.lies_in(index, extent)
        if is_known or str(index.ty.dtype) != "int64":
            return index
        position = self.indexer.position(index, extent)
        self.positions.append((position, index))
        return position

    def name(self, value: Expr, hint: str) -> Expr:
        """Bind ``value`` to a variable by a Let around the whole expression."""
        if isinstance(value, tirx.Var | tirx.IntImm | tirx.FloatImm):
            return value
        dtype = str(value.ty.dtype)
        if dtype == "bool":  # TVM's analyzer refuses a Let of a vector of booleans.
            return value
        var = tirx.Var(hint, dtype)
        self.bindings.append((var, value))
        return var


def _key(buffer: Buffer, offset: Expr) -> tuple[Any, int]:
    return buffer, tvm_ffi.structural_hash(offset)


def reads(
    kernel: Kernel, stored: set[Any], indexer: Indexer, stage: KernelStage, at: Mapping[Any, Expr]
) -> Iterator[tuple[KernelStage, Buffer, Indices]]:
    """Yield (reader, buffer, indices) of each read from memory for an element of ``stage``.

    The reader is ``stage`` itself, or an unstored stage that is computed inside it.
    """
    for load in stage.loads:
        indices = tuple(indexer.simplify(substitute(i, dict(at))) for i in load.indices)
        producer = None if load.buffer in stored else kernel.producer(load.buffer)
        if producer is None:
            yield stage, load.buffer, indices
        else:
            yield from reads(kernel, stored, indexer, producer, producer.at(indices))

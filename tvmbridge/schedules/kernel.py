"""Parse a fused tensor-expression function into a list of stages, one for each block.

TE and FuseTIR generate functions of one form: a sequence of perfect loop nests over constant
extents, each with one block that stores one element of one buffer. :func:`parse` reads this form.
For any other form it returns None, and the function keeps its loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize

from tvmbridge.schedules import bfloat16
from tvmbridge.schedules.reader import (
    Axis,
    Buffer,
    ExpressionReader,
    Load,
    UnsupportedError,
    fresh_lets,
    mentions,
    require,
    substitute,
)

_COMBINERS: dict[type, Callable[[Expr, Expr], Expr]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Max: tirx.Max,
    tirx.Min: tirx.Min,
    tirx.And: tirx.And,
    tirx.Or: tirx.Or,
}


@dataclass(frozen=True)
class Reduction:
    """``accumulator = combine(accumulator, element)`` starting from ``init``."""

    init: Expr
    combine: Callable[[Expr, Expr], Expr]


@dataclass
class KernelStage:
    """One block: ``buffer[dims] = value`` (or the reduction of ``value``) over ``axes``.

    - ``dims``: the axis that indexes each dimension of ``buffer``; None if no axis does.
    - ``loads``: the reads; each is a variable (its slot) in expressions.
    - ``binds``: named intermediate values, in order. Each may use axes, slots and earlier names.
    - ``value``: the element to store or to reduce, in terms of axes, slots and names.
    - ``reduction``: how elements are combined; None if the block reduces nothing.
    - ``cost``: the number of expression nodes.
    - ``vectorizable``: whether the element can be computed in a vector loop.
    - ``guards``: the conditions of choices between reads that may be out of bounds. None if there
      are no such reads, or if something else prevents vectorization.
    """

    name: str
    axes: tuple[Axis, ...]
    buffer: Buffer
    dims: tuple[Any, ...]
    loads: tuple[Load, ...]
    binds: tuple[tuple[tirx.Var, Expr], ...]
    value: Expr
    reduction: Reduction | None
    cost: int
    vectorizable: bool
    guards: tuple[Expr, ...] | None = None

    @property
    def spatial(self) -> tuple[Axis, ...]:
        """The axes of the result, in the order of its dimensions."""
        return tuple(axis for axis in self.axes if not axis.reduce)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        """The axes that are reduced."""
        return tuple(axis for axis in self.axes if axis.reduce)

    def at(self, indices: Sequence[Expr]) -> dict[Any, Expr]:
        """Return the value of each spatial axis for the element of the result at ``indices``."""
        values = {axis.var: tirx.IntImm("int64", 0) for axis in self.spatial}
        pairs = zip(self.dims, indices, strict=True)
        return values | {var: index for var, index in pairs if var is not None}

    @property
    def size(self) -> int:
        """The number of elements of the result."""
        return prod(axis.extent for axis in self.spatial)

    @property
    def depth(self) -> int:
        """The number of elements combined into one element of the result."""
        return prod(axis.extent for axis in self.reduced)

    @property
    def dtype(self) -> str:
        """The dtype in which the result is computed."""
        return bfloat16.held_as(str(self.buffer.dtype))


@dataclass
class Kernel:
    """A parsed function.

    - ``params``: the parameters of the function, in order.
    - ``stages``: its blocks, in order.
    - ``outputs``: the parameters that stages write.
    """

    params: tuple[Any, ...]
    stages: list[KernelStage]
    outputs: set[Any]

    def producer(self, buffer: Buffer) -> KernelStage | None:
        """Return the stage that writes ``buffer``; None if it is an input."""
        return next((stage for stage in self.stages if stage.buffer.same_as(buffer)), None)


def parse(func: tirx.PrimFunc) -> Kernel | None:
    """Return the stages of a function; None if the function is not of the supported form."""
    try:
        return _parse(func)
    except (UnsupportedError, bfloat16.BFloat16Error):
        return None


def _parse(func: tirx.PrimFunc) -> Kernel:
    root = func.body
    require(isinstance(root, SBlockRealize) and root.block.name_hint == "root")
    block = root.block
    require(not block.match_buffers and block.init is None)
    nests = list(block.body.seq) if isinstance(block.body, tirx.SeqStmt) else [block.body]
    stages = [_parse_nest(nest) for nest in nests]
    require(all(axis.extent > 0 for stage in stages for axis in stage.axes))
    written = [stage.buffer for stage in stages]
    require(len(set(written)) == len(written))
    params = tuple(func.params)
    require(all(tirx.is_buffer_var(param) for param in params))
    return Kernel(params, stages, set(written) & set(params))


def _parse_nest(stmt: tirx.Stmt) -> KernelStage:
    extents: dict[Any, int] = {}
    while isinstance(stmt, tirx.For):
        require(stmt.kind == tirx.ForKind.SERIAL and isinstance(stmt.extent, tirx.IntImm))
        require(isinstance(stmt.min, tirx.IntImm) and int(stmt.min) == 0)
        extents[stmt.loop_var] = int(stmt.extent)
        stmt = stmt.body
    require(isinstance(stmt, SBlockRealize) and isinstance(stmt.block, SBlock))
    block = stmt.block
    require(isinstance(stmt.predicate, tirx.IntImm) and bool(int(stmt.predicate)))
    require(not block.alloc_buffers and not block.match_buffers)
    require(isinstance(block.body, tirx.BufferStore))
    axes = []
    for iter_var, value in zip(block.iter_vars, stmt.iter_values, strict=True):
        bound = extents.get(value) if isinstance(value, tirx.Var) else 1
        require(bound is not None and isinstance(iter_var.dom.extent, tirx.IntImm))
        require(iter_var.iter_type in (tirx.IterVar.DataPar, tirx.IterVar.CommReduce))
        extent = int(iter_var.dom.extent)
        require(extent == bound and int(iter_var.dom.min) == 0)
        axes.append(Axis(iter_var.var, extent, iter_var.iter_type == tirx.IterVar.CommReduce))
    return _stage(block, tuple(axes))


def _stage(block: SBlock, axes: tuple[Axis, ...]) -> KernelStage:
    store = block.body
    spatial = [axis.var for axis in axes if not axis.reduce]
    dims = _dimensions(store, spatial)
    unit = {axis.var for axis in axes if axis.extent == 1}
    require(all(var in unit or var in dims for var in spatial))
    reader = ExpressionReader(axes)
    value = reader.read(store.value)
    reduction = None
    if block.init is not None:
        require(isinstance(block.init, tirx.BufferStore))
        value, reduction = _split_reduction(
            store.buffer, bfloat16.widen(block.init.value), value, reader
        )
    else:
        require(not any(axis.reduce for axis in axes))
    require(not any(load.buffer.same_as(store.buffer) for load in reader.loads))
    return KernelStage(
        name=block.name_hint,
        axes=axes,
        buffer=store.buffer,
        dims=dims,
        loads=tuple(reader.loads),
        binds=tuple(reader.binds),
        value=value,
        reduction=reduction,
        cost=reader.cost,
        vectorizable=reader.vectorizable,
        guards=reader.guards,
    )


def _dimensions(store: tirx.BufferStore, spatial: list[tirx.Var]) -> tuple[Any, ...]:
    """Return the axis that indexes each dimension, None for a dimension of extent 1 without one."""
    dims: list[Any] = []
    left = list(spatial)
    for index, extent in zip(store.indices, store.buffer.shape, strict=True):
        if isinstance(index, tirx.IntImm):
            require(int(extent) == 1)
            dims.append(None)
            continue
        position = next((i for i, var in enumerate(left) if index.same_as(var)), len(left))
        require(position < len(left))
        dims.append(left[position])
        left = left[position + 1 :]
    return tuple(dims)


def _split_reduction(
    buffer: Buffer, init: Expr, value: Expr, reader: ExpressionReader
) -> tuple[Expr, Reduction]:
    """Split the value ``combine(old, element)`` of a block into the element and the reduction."""
    old = [load for load in reader.loads if load.buffer.same_as(buffer)]
    require(len(old) == 1)
    reader.loads.remove(old[0])
    slot = old[0].slot
    combine = _COMBINERS.get(type(value))
    if combine is not None and not reader.uses_in_binds(slot):
        if value.a.same_as(slot) and not mentions(value.b, slot):
            return value.b, Reduction(init, combine)
        if value.b.same_as(slot) and not mentions(value.a, slot):
            return value.a, Reduction(init, combine)
    # Any other combination is supported if the element is a single read.
    require(len(reader.loads) == 1)
    element = reader.loads[0].slot
    body = value
    for var, bound in reversed(reader.binds):
        body = tirx.Let(var, bound, body)
    reader.binds.clear()

    def combine_by_substitution(a: Expr, b: Expr) -> Expr:
        return fresh_lets(substitute(body, {slot: a, element: b}))

    return element, Reduction(init, combine_by_substitution)


def virtual_stages(kernel: Kernel, stored: set[Any], stage: KernelStage) -> list[KernelStage]:
    """Return ``stage`` and all stages that are computed inside it because no buffer stores them."""
    found: list[KernelStage] = []
    pending = [stage]
    while pending:
        current = pending.pop()
        if any(current is seen for seen in found):
            continue
        found.append(current)
        for load in current.loads:
            producer = kernel.producer(load.buffer)
            if producer is not None and load.buffer not in stored:
                pending.append(producer)
    return found

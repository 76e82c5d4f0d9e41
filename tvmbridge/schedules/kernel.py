"""A fused tensor-expression function read as a list of stages, one for each block.

TE and FuseTIR make functions of one form only: a sequence of perfect loop nests over constant extents,
each with one block that stores one element of one buffer. :func:`parse` reads that form; a function of
any other form is not read (the result is None) and keeps the loops that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Range, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer

from tvmbridge.schedules import bfloat16

Buffer = Any
_COMBINERS: dict[type, Callable[[Expr, Expr], Expr]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Max: tirx.Max,
    tirx.Min: tirx.Min,
    tirx.And: tirx.And,
    tirx.Or: tirx.Or,
}


@dataclass(frozen=True)
class Axis:
    """An iteration variable of a stage, from 0 to ``extent``."""

    var: tirx.Var
    extent: int
    reduce: bool


@dataclass(frozen=True)
class Load:
    """A read of ``buffer[indices]``, replaced in the stage's expressions by ``slot``.

    A guarded read may be evaluated only where the expression around it chooses it.
    """

    slot: tirx.Var
    buffer: Buffer
    indices: tuple[Expr, ...]
    guarded: bool


@dataclass(frozen=True)
class Reduction:
    """``accumulator = combine(accumulator, element)`` starting from ``init``."""

    init: Expr
    combine: Callable[[Expr, Expr], Expr]


@dataclass
class Stage:
    """One block: ``buffer[dims] = value`` (or the reduction of ``value``) over ``axes``.

    ``binds`` are named intermediate values in order; they and ``value`` mention iteration variables,
    the slots of ``loads`` and earlier names.
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

    @property
    def spatial(self) -> tuple[Axis, ...]:
        """The axes of the result, in the order of its dimensions."""
        return tuple(axis for axis in self.axes if not axis.reduce)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        """The axes that are summed over."""
        return tuple(axis for axis in self.axes if axis.reduce)

    def at(self, indices: Sequence[Expr]) -> dict[Any, Expr]:
        """Return the value of each spatial axis for an element of the result."""
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
    """A function and its stages; ``outputs`` are the buffers that the caller sees."""

    func: tirx.PrimFunc
    stages: list[Stage]
    outputs: set[Any] = field(default_factory=set)

    def producer(self, buffer: Buffer) -> Stage | None:
        """Return the stage that writes ``buffer``, if one does."""
        return next((stage for stage in self.stages if stage.buffer.same_as(buffer)), None)


class _Unsupported(Exception):
    """The function is not of the form that :func:`parse` reads."""


def _require(condition: bool) -> None:
    if not condition:
        raise _Unsupported


def parse(func: tirx.PrimFunc) -> Kernel | None:
    """Read a function, or return None if it is of another form."""
    try:
        return _parse(func)
    except (_Unsupported, bfloat16.UnsupportedError):
        return None


def _parse(func: tirx.PrimFunc) -> Kernel:
    root = func.body
    _require(isinstance(root, SBlockRealize) and root.block.name_hint == "root")
    block = root.block
    _require(not block.match_buffers and block.init is None)
    nests = list(block.body.seq) if isinstance(block.body, tirx.SeqStmt) else [block.body]
    stages = [_parse_nest(nest) for nest in nests]
    _require(all(axis.extent > 0 for stage in stages for axis in stage.axes))
    written = [stage.buffer for stage in stages]
    _require(len(set(written)) == len(written))
    params = set(func.params)
    _require(all(tirx.is_buffer_var(param) for param in params))
    return Kernel(func, stages, {buffer for buffer in written if buffer in params})


def _parse_nest(stmt: tirx.Stmt) -> Stage:
    extents: dict[Any, int] = {}
    while isinstance(stmt, tirx.For):
        _require(stmt.kind == tirx.ForKind.SERIAL and isinstance(stmt.extent, tirx.IntImm))
        _require(isinstance(stmt.min, tirx.IntImm) and int(stmt.min) == 0)
        extents[stmt.loop_var] = int(stmt.extent)
        stmt = stmt.body
    _require(isinstance(stmt, SBlockRealize) and isinstance(stmt.block, SBlock))
    block = stmt.block
    _require(isinstance(stmt.predicate, tirx.IntImm) and bool(int(stmt.predicate)))
    _require(not block.alloc_buffers and not block.match_buffers)
    _require(isinstance(block.body, tirx.BufferStore))
    axes = []
    for iter_var, value in zip(block.iter_vars, stmt.iter_values, strict=True):
        bound = extents.get(value) if isinstance(value, tirx.Var) else 1
        _require(bound is not None and isinstance(iter_var.dom.extent, tirx.IntImm))
        _require(iter_var.iter_type in (tirx.IterVar.DataPar, tirx.IterVar.CommReduce))
        extent = int(iter_var.dom.extent)
        _require(extent == bound and int(iter_var.dom.min) == 0)
        axes.append(Axis(iter_var.var, extent, iter_var.iter_type == tirx.IterVar.CommReduce))
    return _stage(block, tuple(axes))


def _stage(block: SBlock, axes: tuple[Axis, ...]) -> Stage:
    store = block.body
    spatial = [axis.var for axis in axes if not axis.reduce]
    dims = _dimensions(store, spatial)
    unit = {axis.var for axis in axes if axis.extent == 1}
    _require(all(var in unit or var in dims for var in spatial))
    reader = _Reader(axes)
    value = reader.read(store.value)
    reduction = None
    if block.init is not None:
        _require(isinstance(block.init, tirx.BufferStore))
        value, reduction = _split_reduction(
            store.buffer, bfloat16.widen(block.init.value), value, reader
        )
    else:
        _require(not any(axis.reduce for axis in axes))
    _require(not any(load.buffer.same_as(store.buffer) for load in reader.loads))
    return Stage(
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
    )


def _dimensions(store: tirx.BufferStore, spatial: list[tirx.Var]) -> tuple[Any, ...]:
    """Return the axis that indexes each dimension, None for a dimension of extent 1 without one."""
    dims: list[Any] = []
    left = list(spatial)
    for index, extent in zip(store.indices, store.buffer.shape, strict=True):
        if isinstance(index, tirx.IntImm):
            _require(int(extent) == 1)
            dims.append(None)
            continue
        position = next((i for i, var in enumerate(left) if index.same_as(var)), None)
        _require(position is not None)
        dims.append(left[position])
        left = left[position + 1 :]
    return tuple(dims)


def _split_reduction(
    buffer: Buffer, init: Expr, value: Expr, reader: _Reader
) -> tuple[Expr, Reduction]:
    """Take ``combine(old, element)`` apart."""
    old = [load for load in reader.loads if load.buffer.same_as(buffer)]
    _require(len(old) == 1)
    reader.loads.remove(old[0])
    slot = old[0].slot
    combine = _COMBINERS.get(type(value))
    if combine is not None and not reader.uses_in_binds(slot):
        if value.a.same_as(slot) and not _mentions(value.b, slot):
            return value.b, Reduction(init, combine)
        if value.b.same_as(slot) and not _mentions(value.a, slot):
            return value.a, Reduction(init, combine)
    # Any other combination is understood if the element is a single read.
    _require(len(reader.loads) == 1)
    element = reader.loads[0].slot
    body = value
    for var, bound in reversed(reader.binds):
        body = tirx.Let(var, bound, body)
    reader.binds.clear()

    def combine_by_substitution(a: Expr, b: Expr) -> Expr:
        return fresh_lets(substitute(body, {slot: a, element: b}))

    return element, Reduction(init, combine_by_substitution)


def _mentions(expr: Expr, var: tirx.Var) -> bool:
    found = []
    tvm_ffi.structural_walk(expr, (tirx.Var, lambda v: found.append(v) if v.same_as(var) else None))
    return bool(found)


def substitute(expr: Expr, values: dict[Any, Expr]) -> Expr:
    """Replace variables by expressions."""
    if not values:
        return expr
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))


def fresh_lets(expr: Expr) -> Expr:
    """Rename the variables that ``expr`` binds, so that it may stand twice in one function."""

    def rename(let: tirx.Let) -> tirx.Let:
        var = tirx.Var(let.var.name, str(let.var.ty.dtype))
        return tirx.Let(var, let.value, substitute(let.body, {let.var: var}))

    return tvm_ffi.structural_map(expr, (tirx.Let, rename))


class _Reader:
    """Replaces the reads of an expression by slots and lifts its Lets."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        self.loads: list[Load] = []
        self.binds: list[tuple[tirx.Var, Expr]] = []
        self.cost = 0
        self.vectorizable = True
        self._axes = axes
        self._choices = False
        self._analyzer = Analyzer()
        for axis in axes:
            if axis.extent > 0:
                self._analyzer.bind(axis.var, Range(0, axis.extent))

    def read(self, expr: Expr) -> Expr:
        """Return ``expr`` over slots; :attr:`loads` and :attr:`binds` say what they stand for."""
        half = _has_bfloat16(expr)
        self._choices = _has_choices(expr)
        expr = tvm_ffi.structural_map(expr, (TensorLoad, self._load))
        if half:
            expr = bfloat16.widen(expr)
        return tvm_ffi.structural_mutate(self._finish(expr), (tirx.Let, self._lift))

    def uses_in_binds(self, var: tirx.Var) -> bool:
        """Return whether a lifted name's value mentions ``var``."""
        return any(_mentions(value, var) for _, value in self.binds)

    def _load(self, load: TensorLoad) -> Expr:
        for seen in self.loads:
            if seen.buffer.same_as(load.source) and all(
                tvm_ffi.structural_equal(a, b) for a, b in zip(seen.indices, load.indices, strict=True)
            ):
                return seen.slot
        slot = tirx.Var("v", bfloat16.held_as(str(load.source.dtype)))
        known = {axis.var for axis in self._axes} | {seen.slot for seen in self.loads}
        _require(all(variables(index) <= known for index in load.indices))
        guarded = self._choices and not self._inside(load)
        self.loads.append(Load(slot, load.source, tuple(load.indices), guarded))
        return slot

    def _inside(self, load: TensorLoad) -> bool:
        """Return whether a read is known to be within its buffer."""
        return all(
            self._analyzer.can_prove(index >= 0) and self._analyzer.can_prove(index < extent)
            for index, extent in zip(load.indices, load.source.shape, strict=True)
            if not isinstance(index, tirx.IntImm)
        )

    def _finish(self, expr: Expr) -> Expr:
        """Turn choices between safe values into selects; note what cannot be vectorized."""
        expr = tvm_ffi.structural_map(expr, (tirx.Cast, _select_number))
        if not any(load.guarded for load in self.loads):
            expr = tvm_ffi.structural_map(expr, (Call, _select))
        else:
            self.vectorizable = False

        def count(node: Expr) -> None:
            self.cost += 1
            if isinstance(node, Call) and not _is_vectorizable(node):
                self.vectorizable = False

        tvm_ffi.structural_walk(expr, (Expr, count))
        return expr

    def _lift(self, let: tirx.Let, mutator: Any) -> Expr:
        self.binds.append((let.var, mutator.mutate(let.value)))
        return mutator.mutate(let.body)


def _has_bfloat16(expr: Expr) -> bool:
    found: list[bool] = []

    def look(node: Expr) -> None:
        if str(getattr(node.ty, "dtype", "")) == bfloat16.NAME:
            found.append(True)

    tvm_ffi.structural_walk(expr, (Expr, look))
    return bool(found)


def _has_choices(expr: Expr) -> bool:
    found: list[bool] = []

    def look(node: Expr) -> None:
        if isinstance(node, tirx.Select) or _is_if(node):
            found.append(True)

    tvm_ffi.structural_walk(expr, (Expr, look))
    return bool(found)


def _is_if(node: Expr) -> bool:
    return isinstance(node, Call) and getattr(node.op, "name", "") == "prim.if_then_else"


def variables(expr: Expr) -> set[Any]:
    """Return the scalar variables of an expression."""
    found: set[Any] = set()
    tvm_ffi.structural_walk(expr, (tirx.Var, lambda v: found.add(v)))
    return found


def _select(call: Call) -> Expr:
    return tirx.Select(*call.args) if _is_if(call) else call


def _select_number(cast: tirx.Cast) -> Expr:
    """Spell out a truth value's integer: the simplifier stops at the cast of a vector of them."""
    dtype = str(cast.ty.dtype)
    if str(cast.value.ty.dtype) != "bool" or "float" in dtype:
        return cast
    return tirx.Select(cast.value, tirx.IntImm(dtype, 1), tirx.IntImm(dtype, 0))


def _is_vectorizable(call: Call) -> bool:
    name = getattr(call.op, "name", "")
    if name in ("tirx.reinterpret", "prim.if_then_else"):
        return name == "tirx.reinterpret"
    get = getattr(call.op, "get_attr", None)
    return bool(get and get("TVectorizable"))

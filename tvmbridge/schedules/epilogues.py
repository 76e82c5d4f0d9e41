"""Element-wise operators that follow a kernel, computed where the kernel stores its result.

A kernel of generated loops (a product, a convolution) stores each element of its result from
registers, and reads none back. Another function computed a bias and an activation after it: it
read the result from memory, and stored it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize

from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.kernel import KernelStage
from tvmbridge.schedules.loops import load, sequence, store
from tvmbridge.schedules.reader import Buffer, substitute

# Longer expressions are computed in a loop over the rows of a tile, not unrolled for each of its
# vectors: the code of a GELU would be 16 times as long, and LLVM's time as well.
_SHORT = 60


class NotFusedError(Exception):
    """The kernel does not store its result in a form that operators can be fused into."""


@dataclass(frozen=True)
class ReadOperand:
    """An operand of an operator that the kernel did not compute.

    - ``number``: its place among the operands.
    - ``dims``: the dimensions of the kernel's result that index it; it broadcasts over others.
    """

    number: int
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """An element-wise operator.

    - ``stage``: its loops; None for a reshape.
    - ``sources``: for each load of the stage, an operand, or the number of an earlier value: 0 is
      the kernel's, n is the result of step n - 1.
    """

    stage: KernelStage | None
    sources: tuple[ReadOperand | int, ...]


@dataclass(frozen=True)
class StoreEpilogue:
    """The operators that follow a kernel; the result of the last one is stored.

    - ``shapes``: the shapes of the operands.
    """

    steps: tuple[Step, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def short(self) -> bool:
        """Whether the expression may be repeated for each vector of a tile."""
        return sum(s.stage.cost for s in self.steps if s.stage is not None) <= _SHORT


def fused(kernel: tirx.PrimFunc, epilogue: StoreEpilogue) -> tirx.PrimFunc:
    """Return ``kernel`` with the operators of ``epilogue``, and operands before its result.

    Raises:
        NotFusedError: the kernel reads its result, or stores it without vectors.
    """
    *given, out = kernel.params
    operands = [
        tirx.decl_buffer([integer(n) for n in shape], "float32", f"operand{number}")
        for number, shape in enumerate(epilogue.shapes)
    ]
    if _reads(kernel.body, out):
        raise NotFusedError
    body = _Fusing(epilogue, operands, out).rewritten(kernel.body)
    return tirx.PrimFunc([*given, *operands, out], body).with_attrs(dict(kernel.attrs))


def _reads(body: tirx.Stmt, buffer: Buffer) -> bool:
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(body, (TensorLoad, found.append))
    return any(read.source.same_as(buffer) for read in found)


@dataclass(frozen=True)
class _Fusing:
    """Rewrites the statements of a kernel.

    - ``vector``: whether a vector loop is around the statement.
    """

    epilogue: StoreEpilogue
    operands: Sequence[Buffer]
    out: Buffer
    vector: bool = False

    def rewritten(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.BufferStore):
            return self._stored(stmt) if stmt.buffer.same_as(self.out) else stmt
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self.rewritten(s) for s in stmt.seq])
        if isinstance(stmt, tirx.For):
            return self._loop(stmt)
        if isinstance(stmt, tirx.IfThenElse):
            other = stmt.else_case
            other = None if other is None else self.rewritten(other)
            return tirx.IfThenElse(stmt.condition, self.rewritten(stmt.then_case), other)
        if isinstance(stmt, SBlockRealize):
            block = stmt.block
            if block.init is not None or block.alloc_buffers or block.match_buffers:
                raise NotFusedError
            made = SBlock(
                block.iter_vars,
                block.reads,
                block.writes,
                block.name_hint,
                self.rewritten(block.body),
            )
            return SBlockRealize(stmt.iter_values, stmt.predicate, made)
        if isinstance(stmt, tirx.AllocBuffer | tirx.Bind):
            return stmt
        raise NotFusedError  # such as a call, which may write the result

    def _loop(self, stmt: tirx.For) -> tirx.Stmt:
        if stmt.kind == tirx.ForKind.UNROLLED and not self.epilogue.short:
            tile = self._by_rows(stmt)
            if tile is not None:
                return tile
        inner = self
        if stmt.kind == tirx.ForKind.VECTORIZED:
            inner = replace(self, vector=True)
        return _with_body(stmt, inner.rewritten(stmt.body), stmt.kind)

    def _by_rows(self, nest: tirx.For) -> tirx.Stmt | None:
        """Return the statements that store a tile by a loop over its rows; None for another nest.

        The tile is copied from registers into memory before, where a loop can index it.
        """
        loops, innermost = [], nest
        while isinstance(innermost, tirx.For):
            loops.append(innermost)
            innermost = innermost.body
        if not isinstance(innermost, tirx.BufferStore) or not innermost.buffer.same_as(self.out):
            return None
        sums = innermost.value
        if not isinstance(sums, TensorLoad) or loops[-1].kind != tirx.ForKind.VECTORIZED:
            return None
        tile = tirx.decl_buffer(list(sums.source.shape), "float32", "tile")
        copied = self._nest(loops, store(tile, sums, *sums.indices))
        value = self._value(load(tile, *sums.indices), list(innermost.indices))
        stored = store(self.out, value, *innermost.indices)
        names = {each.loop_var: tirx.Var(each.loop_var.name, "int64") for each in loops}
        stored = tvm_ffi.structural_map(stored, (tirx.Var, lambda v: names.get(v, v)))
        for each in reversed(loops):
            kind = each.kind if each is loops[-1] else tirx.ForKind.SERIAL
            stored = tirx.For(names[each.loop_var], each.min, each.extent, kind, stored)
        return sequence([tirx.AllocBuffer(tile), copied, stored])

    def _nest(self, loops: Sequence[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
        for each in reversed(loops):
            body = _with_body(each, body, each.kind)
        return body

    def _stored(self, stmt: tirx.BufferStore) -> tirx.Stmt:
        if not self.vector:
            raise NotFusedError
        value = self._value(stmt.value, list(stmt.indices))
        return store(self.out, value, *stmt.indices)

    def _value(self, element: Expr, indices: Sequence[Expr]) -> Expr:
        """Return the result for the kernel's ``element`` at ``indices``."""
        lets: list[tuple[tirx.Var, Expr]] = []

        def named(value: Expr) -> tirx.Var:
            var = tirx.Var("v", "float32")
            lets.append((var, value))
            return var

        values = [named(element)]
        for step in self.epilogue.steps:
            read = [
                load(self.operands[s.number], *([indices[d] for d in s.dims] or [integer(0)]))
                if isinstance(s, ReadOperand)
                else values[s]
                for s in step.sources
            ]
            if step.stage is None:
                values.append(read[0])
                continue
            known = {each.slot: value for each, value in zip(step.stage.loads, read, strict=True)}
            for var, bound in step.stage.binds:
                fresh = tirx.Var(var.name, str(var.ty.dtype))
                lets.append((fresh, substitute(bound, known)))
                known[var] = fresh
            values.append(named(substitute(step.stage.value, known)))
        result: Expr = values[-1]
        for var, value in reversed(lets):
            result = tirx.Let(var, value, result)
        return result


def _with_body(stmt: tirx.For, body: tirx.Stmt, kind: tirx.ForKind) -> tirx.For:
    return tirx.For(stmt.loop_var, stmt.min, stmt.extent, kind, body)

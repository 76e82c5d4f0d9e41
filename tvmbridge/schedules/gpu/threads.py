"""Statement builders for GPU kernels: grids of blocks, barriers, and reductions over threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.op import tvm_storage_sync, tvm_warp_shuffle_xor

from tvmbridge.schedules.indexing import Indexer, index_var, integer
from tvmbridge.schedules.kernel import Reduction
from tvmbridge.schedules.loops import load, sequence, store
from tvmbridge.schedules.reader import Buffer

WARP = 32
MOST_THREADS = 1024
_ALL_LANES = 0xFFFFFFFF
# The dtypes that warps can exchange; values of other dtypes are widened.
_EXCHANGED = ("float32", "float64", "int32", "int64")


def launch(
    indexer: Indexer,
    blocks: int,
    threads: int,
    body: Callable[[Expr, Expr], list[tirx.Stmt]],
) -> tirx.Stmt:
    """Return a kernel that runs ``body(block, thread)`` in ``blocks`` blocks of ``threads``."""
    block, thread = index_var("block"), index_var("thread")
    indexer.bind(block, blocks)
    indexer.bind(thread, threads)
    inner = _bound(thread, threads, "threadIdx.x", sequence(body(block, thread)))
    return _bound(block, blocks, "blockIdx.x", inner)


def _bound(var: tirx.Var, extent: int, tag: str, body: tirx.Stmt) -> tirx.Stmt:
    binding = tirx.IterVar(None, tirx.Var(tag, "int64"), tirx.IterVar.ThreadIndex, tag)
    kind = tirx.ForKind.THREAD_BINDING
    return tirx.For(var, integer(0), integer(extent), kind, body, thread_binding=binding)


def when(condition: Expr | None, statements: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """Return ``statements`` in an ``if``; unchanged if ``condition`` is None."""
    if condition is None:
        return statements
    return [tirx.IfThenElse(condition, sequence(statements), None)]


def barrier() -> tirx.Stmt:
    """Return a barrier for all threads of a block; all see the writes that came before it."""
    return tirx.Evaluate(tvm_storage_sync("shared"))


def allocate_in(scope: str, size: int, dtype: str, name: str) -> tuple[Buffer, tirx.Stmt]:
    """Return a buffer in a storage scope (``local`` or ``shared``), and its allocation."""
    buffer = tirx.decl_buffer([integer(size)], dtype, name, scope=scope)
    return buffer, tirx.AllocBuffer(buffer)


@dataclass(frozen=True)
class Team:
    """Neighbouring threads that work on one row; a team larger than a warp is the whole block.

    - ``size``: the number of threads, a power of two.
    - ``rank``: the number of a thread in its team.
    """

    size: int
    rank: Expr

    def all_reduce(self, value: Buffer, reduction: Reduction, dtype: str) -> list[tirx.Stmt]:
        """Return the statements that combine ``value[0]`` of all threads of the team.

        Afterwards each thread has the result in ``value[0]``. The order of the combination is
        fixed. If the team is larger than a warp, the statements contain a barrier.
        """
        statements = []
        offset = min(self.size, WARP) // 2
        while offset:
            mine = load(value, integer(0))
            other = exchanged(mine, dtype, offset)
            statements.append(store(value, reduction.combine(mine, other), integer(0)))
            offset //= 2
        if self.size > WARP:
            statements += self._across_warps(value, reduction, dtype)
        return statements

    def _across_warps(self, value: Buffer, reduction: Reduction, dtype: str) -> list[tirx.Stmt]:
        warps = self.size // WARP
        parts, room = allocate_in("shared", warps, dtype, "warps")
        first = (self.rank % integer(WARP)).equal(integer(0))
        put = store(parts, load(value, integer(0)), self.rank // integer(WARP))
        # Every thread combines all parts as a tree: no second exchange, one rounding per level.
        # The tree is an array, because TVM would inline variables at each of their reads.
        tree, more = allocate_in("local", warps // 2, dtype, "tree")
        combined, source, count = list[tirx.Stmt](), parts, warps
        while count > 1:
            count //= 2
            for i in range(count):
                pair = (load(source, integer(2 * i)), load(source, integer(2 * i + 1)))
                combined.append(store(tree, reduction.combine(*pair), integer(i)))
            source = tree
        done = store(value, load(tree, integer(0)), integer(0))
        return [room, more, *when(first, [put]), barrier(), *combined, done]


def exchanged(value: Expr, dtype: str, offset: int) -> Expr:
    """Return the value of the thread whose lane number differs in the bit ``offset``."""
    wide = dtype if dtype in _EXCHANGED else "float32" if "float" in dtype else "int32"
    sent = value if wide == dtype else tirx.Cast(wide, value)
    mask = tirx.const(_ALL_LANES, "uint32")
    numbers: list[Any] = [tirx.const(n, "int32") for n in (offset, WARP, WARP)]
    received = tvm_warp_shuffle_xor(mask, sent, *numbers)
    return received if wide == dtype else tirx.Cast(dtype, received)

"""Statement builders: sequences, loops, vector loops, local buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import Rule, decided, divides, sizes_vary
from tvmbridge.schedules.indexing import index_var, integer
from tvmbridge.schedules.kernel import Reduction
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.values import Evaluator, Lane

Body = Callable[[Expr], list[tirx.Stmt]]


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Return one statement that runs ``statements`` in order."""
    if len(statements) == 1:
        return statements[0]
    return tirx.SeqStmt(list(statements)) if statements else tirx.Evaluate(integer(0))


def loop(
    extent: Expr | int, body: Body, kind: tirx.ForKind = tirx.ForKind.SERIAL, start: Expr | int = 0
) -> tirx.Stmt:
    """Return a loop over [start, start + extent); a loop of extent 1 becomes its body."""
    first = integer(start) if isinstance(start, int) else start
    once = isinstance(extent, int) and extent == 1
    return sequence(body(first)) if once else _loop(extent, body, kind, first)


def loop_over(extent: int, body: Body, kind: tirx.ForKind = tirx.ForKind.SERIAL) -> tirx.Stmt:
    """Return a loop over [0, extent), where the extent is computed from sizes.

    In code for any size, it becomes its body only if the extent is 1 at all sizes.
    """
    first = integer(0)
    once = decided(Rule.ALWAYS, lambda: extent == 1)
    return sequence(body(first)) if once else _loop(extent, body, kind, first)


def _loop(extent: Expr | int, body: Body, kind: tirx.ForKind, first: Expr) -> tirx.Stmt:
    if isinstance(extent, int):
        extent = integer(extent)
    var = index_var("i")
    return tirx.For(var, first, extent, kind, sequence(body(var)))


def rounded_up(extent: int | Expr, divisor: int) -> int | Expr:
    """Return ``extent / divisor``, rounded up.

    If code for several sample sizes is to become code for any size (``sizes_vary()``), the result
    stays a quotient expression. A plain number would not show which extent it came from.
    """
    if isinstance(extent, int):
        if not sizes_vary():
            return -(-extent // divisor)
        once = decided(Rule.ALWAYS, lambda: extent <= divisor)
        # The divisor may be smaller in the end: where all sizes are small, each one is its own.
        if divides(divisor, extent) and once:
            return 1
    whole = integer(extent) if isinstance(extent, int) else extent
    return tirx.FloorDiv(tirx.Add(whole, integer(divisor - 1)), integer(divisor))


def less(extent: int, amount: int) -> Expr:
    """Return ``extent - amount``; an unevaluated expression in the case of :func:`rounded_up`."""
    if not sizes_vary():
        return integer(extent - amount)
    return tirx.Sub(integer(extent), integer(amount))


def rounded_down(extent: int, divisor: int) -> Expr:
    """Return ``extent // divisor``; an unevaluated expression in the case of :func:`rounded_up`."""
    if not sizes_vary():
        return integer(extent // divisor)
    return tirx.FloorDiv(integer(extent), integer(divisor))


def vector_loop(lanes: int, body: Body) -> tirx.Stmt:
    """Return a vectorized loop of ``lanes`` iterations."""
    return loop(lanes, body, tirx.ForKind.VECTORIZED)


def element_loop(
    lanes: int, fork: Callable[[Lane], Evaluator], body: Callable[[Evaluator, Expr], None]
) -> list[tirx.Stmt]:
    """Return a vector loop, with the allocations that it needs before it.

    ``fork`` creates an evaluator for the loop; ``body(evaluator, lane)`` adds the statements of one
    lane to the evaluator.
    """
    cells: list[tirx.Stmt] = []

    def statements(lane: Expr) -> list[tirx.Stmt]:
        evaluator = fork(Lane(lane, lanes))
        body(evaluator, lane)
        cells.extend(evaluator.cells)
        return evaluator.statements

    vectors = vector_loop(lanes, statements)
    return [*cells, vectors]


def over_vectors(
    extent: int,
    lanes: int,
    body: Callable[[Expr, Expr | None], list[tirx.Stmt]],
    steps: Callable[[int | Expr, Body], tirx.Stmt] = loop,
) -> tirx.Stmt:
    """Return a loop over [0, extent) in steps of ``lanes``, which is at most ``extent``.

    If ``lanes`` does not divide ``extent``, the last step overlaps the one before it.

    Args:
        body: ``body(base, fresh)`` returns the statements for ``lanes`` positions from ``base``.
            Positions from ``fresh`` on are new; None if no step overlaps.
        steps: builds the loop from the number of steps and its body.
    """
    count = rounded_up(extent, lanes)
    if divides(lanes, extent):
        return steps(count, lambda i: body(i * integer(lanes), None))

    def step(i: Expr) -> list[tirx.Stmt]:
        fresh, base = index_var("fresh"), index_var("base")
        last = tirx.Min(fresh, less(extent, lanes))
        bind = tirx.Bind(fresh, i * integer(lanes))
        return [bind, tirx.Bind(base, last), *body(base, fresh)]

    return steps(count, step)


def allocate(shape: Sequence[int], dtype: str, name: str) -> tuple[Buffer, tirx.Stmt]:
    """Return a new buffer and the statement that allocates it."""
    buffer = tirx.decl_buffer([integer(n) for n in shape], dtype, name)
    return buffer, tirx.AllocBuffer(buffer)


def store(buffer: Buffer, value: Expr, *indices: Expr) -> tirx.Stmt:
    """Return ``buffer[indices] = value``."""
    return tirx.BufferStore(buffer, value, list(indices))


def load(buffer: Buffer, *indices: Expr) -> Expr:
    """Return ``buffer[indices]``."""
    return tirx.BufferLoad(buffer, list(indices))


def combine_lanes(accumulator: Buffer, lanes: int, reduction: Reduction) -> list[tirx.Stmt]:
    """Return the statements that reduce ``lanes`` (a power of two) partial results to element 0."""
    statements = []
    half = lanes // 2
    while half >= 1:

        def step(lane: Expr, half: int = half) -> list[tirx.Stmt]:
            other = load(accumulator, lane + integer(half))
            return [store(accumulator, reduction.combine(load(accumulator, lane), other), lane)]

        statements.append(vector_loop(half, step))
        half //= 2
    return statements


def power_of_two_below(limit: int) -> int:
    """Return the largest power of two that is at most ``limit`` (at least 1)."""
    return 1 << max(limit, 1).bit_length() - 1

"""Products of matrices whose sizes vary, in loops: rows of the result in registers.

A function says by an attribute that it is a product, and whether its right operand lies transposed.
Where it does, elements are sums of products of rows; otherwise rows of the right operand are added.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize

from tvmbridge.core.decisions import divides, fitting
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import (
    allocate,
    less,
    load,
    loop,
    power_of_two_below,
    rounded_down,
    rounded_up,
    sequence,
    store,
    vector_loop,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_tiles import kind_of
from tvmbridge.schedules.reader import Buffer

PRODUCT = "tvmbridge.product"
"""The attribute: :data:`TRANSPOSED` or :data:`STRAIGHT`, how the right operand lies."""
TRANSPOSED, STRAIGHT = "transposed", "straight"

Element = Callable[[Expr, Expr], tirx.Stmt]
_HEIGHT = 4
_WIDTHS = (64, 32, 16, 8, 4)


def is_product(func: tirx.PrimFunc) -> bool:
    """Whether a function says that it is a product, which is not scheduled yet."""
    return PRODUCT in func.attrs


def schedule_product(func: tirx.PrimFunc, machine: Machine) -> tirx.PrimFunc:
    """Return a function that :func:`is_product` with loops for its sizes.

    Its parameters are the operands (batch, rows, depth) and (batch, depth, columns), or the second
    one transposed, and the result (batch, rows, columns).
    """
    left, right, out = func.params
    batch, rows, depth = (int(n) for n in left.shape)
    height = fitting(lambda n: power_of_two_below(min(n, _HEIGHT)), rows)
    tiles = rounded_up(rows, height)
    count = integer(tiles) if isinstance(tiles, int) else tiles
    of_tile = _dots if str(func.attrs[PRODUCT]) == TRANSPOSED else _sums

    def tile(number: Expr) -> list[tirx.Stmt]:
        matrix = number // count
        first = tirx.Min(number % count * integer(height), less(rows, height))
        return of_tile(machine, height, depth, (matrix, first), (left, right, out))

    body = loop(tirx.Mul(integer(batch), count), tile, kind_of(machine.cores))
    root = SBlock([], [], [], "root", body)
    return func.with_body(SBlockRealize([], True, root))


def _sums(
    machine: Machine,
    height: int,
    depth: int,
    place: tuple[Expr, Expr],
    buffers: tuple[Buffer, Buffer, Buffer],
) -> list[tirx.Stmt]:
    """Rows of the result as sums of rows of the right operand."""
    (matrix, first), (left, right, out) = place, buffers
    columns = int(out.shape[2])
    fitting = [width for width in _WIDTHS if divides(width, columns)]
    width = fitting[0] if fitting else 1
    lanes = min(width, machine.lanes)

    def panel(p: Expr) -> list[tirx.Stmt]:
        column = p * integer(width)
        sums, room = allocate([height, width], "float32", "sums")

        def each(element: Element) -> tirx.Stmt:
            return _each(height, width, lanes, element)

        def add(k: Expr) -> list[tirx.Stmt]:
            def term(r: Expr, c: Expr) -> tirx.Stmt:
                by = load(left, matrix, first + r, k) * load(right, matrix, k, column + c)
                return store(sums, load(sums, r, c) + by, r, c)

            return [each(term)]

        cleared = each(lambda r, c: store(sums, tirx.const(0.0, "float32"), r, c))
        written = each(lambda r, c: store(out, load(sums, r, c), matrix, first + r, column + c))
        return [room, cleared, loop(depth, add), written]

    return [loop(rounded_down(columns, width), panel)]


def _dots(
    machine: Machine,
    height: int,
    depth: int,
    place: tuple[Expr, Expr],
    buffers: tuple[Buffer, Buffer, Buffer],
) -> list[tirx.Stmt]:
    """Elements of the result as sums of products of two rows."""
    (matrix, first), (left, right, out) = place, buffers
    fitting = [n for n in _WIDTHS if n <= machine.lanes and divides(n, depth)]
    lanes = fitting[0] if fitting else 1

    def column(j: Expr) -> list[tirx.Stmt]:
        sums, room = allocate([height, lanes], "float32", "sums")
        cleared = _each(
            height, lanes, lanes, lambda r, c: store(sums, tirx.const(0.0, "float32"), r, c)
        )

        def add(k: Expr) -> list[tirx.Stmt]:
            def term(r: Expr, c: Expr) -> tirx.Stmt:
                at = k * integer(lanes) + c
                by = load(left, matrix, first + r, at) * load(right, matrix, j, at)
                return store(sums, load(sums, r, c) + by, r, c)

            return [_each(height, lanes, lanes, term)]

        def whole(r: Expr) -> list[tirx.Stmt]:
            total = load(sums, r, integer(0))
            for lane in range(1, lanes):
                total = total + load(sums, r, integer(lane))
            return [store(out, total, matrix, first + r, j)]

        return [
            room,
            cleared,
            loop(rounded_down(depth, lanes), add),
            loop(height, whole, tirx.ForKind.UNROLLED),
        ]

    return [loop(int(out.shape[2]), column)]


def _each(height: int, width: int, lanes: int, element: Element) -> tirx.Stmt:
    """``element(row, column)`` for all of a tile, without a loop: so it lies in registers."""

    def row(r: Expr) -> list[tirx.Stmt]:
        def vector(v: Expr) -> list[tirx.Stmt]:
            base = v * integer(lanes)
            if lanes == 1:
                return [element(r, base)]
            return [vector_loop(lanes, lambda lane: [element(r, base + lane)])]

        return [loop(width // lanes, vector, tirx.ForKind.UNROLLED)]

    return sequence([loop(height, row, tirx.ForKind.UNROLLED)])

"""A product of float32 matrices in loops, with tiles of the result in registers.

Operands are read in place: vectors from rows of the right operand, and single elements of the left
operand, which may be transposed. So the gradients of a linear layer need no copy: the input's
(cotangent times weight) and the weight's (transposed cotangent times input). Libraries copy their
operands into another layout first. The forward of a linear layer (input times transposed weight) is
computed as the transposed product: only the few rows of the input are transposed before.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.kernels.product_form import Form
from tvmbridge.schedules import scheduled_function
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import allocate, load, loop, sequence, store, vector_loop
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_operands import DTYPE, Matrix, Panels
from tvmbridge.schedules.product_tiles import (
    Tiles,
    Write,
    height_of,
    kind_of,
    start_of,
    width_of,
)
from tvmbridge.schedules.reader import Buffer

# From this depth on, a transposed operand is copied in blocks of `_FEWEST` to `_MOST` tiles: each
# element of its columns is in another cache line, and these lines evict one another.
_DEEP = 160
_FEWEST, _MOST = 4, 20
# With more rows, a product with a transposed matrix spends too much time on copying the rows.
_FEW_ROWS = 128


def fits(form: Form, machine: Machine) -> bool:
    """Whether the generated loops support this product: its layout, and at least a tile's size."""
    height, width = height_of(machine), width_of(machine)
    if not form.right_transposed:
        return form.rows >= height and form.columns >= width
    if form.left_transposed:
        return False
    if _copies_right(form):
        return form.rows >= height and form.columns >= width and form.depth >= machine.lanes
    return height <= form.rows <= _FEW_ROWS and form.columns >= height and form.depth >= width


def _copies_right(form: Form) -> bool:
    """Whether a transposed right operand is copied: the smaller in a batch, else the left."""
    return form.batch is not None and form.columns <= form.rows


def product(form: Form, machine: Machine) -> tirx.PrimFunc:
    """Return the TIR function (operands, result) of a product for which :func:`fits` is true."""
    left, right, out = (
        tirx.decl_buffer([integer(n) for n in shape], DTYPE, name)
        for shape, name in zip(form.shapes, ("left", "right", "out"), strict=True)
    )

    def one(machine: Machine, *batch: Expr) -> tirx.Stmt:
        of_left = () if form.left_shared else batch
        matrices = [Matrix(left, of_left), Matrix(right, batch), Matrix(out, batch)]
        if form.right_transposed:
            emit = _of_copied_columns if _copies_right(form) else _of_few_rows
            return emit(form, machine, *matrices)
        block = _block(form.rows, machine)
        if form.left_transposed and form.depth >= _DEEP and block is not None:
            return _of_copied_rows(form, machine, block, *matrices)
        return _of_matrices(form, machine, *matrices)

    if form.batch is None:
        body = one(machine)
    else:
        alone = replace(machine, cores=1)
        body = loop(form.batch, lambda b: [one(alone, b)], tirx.ForKind.PARALLEL)
    return scheduled_function([left, right, out], body)


def product_of_panels(form: Form, machine: Machine) -> tirx.PrimFunc:
    """Return the TIR function of a product whose right operand is packed as :class:`Panels`.

    Its parameters are the two operands and the result. The result has at least as many columns as
    a tile is wide, and any number of rows.
    """
    width = width_of(machine)
    shapes = ((form.rows, form.depth), panels_shape(form, machine), (form.rows, form.columns))
    left, right, out = (
        tirx.decl_buffer([integer(n) for n in shape], DTYPE, name)
        for shape, name in zip(shapes, ("left", "right", "out"), strict=True)
    )
    assert form.columns >= width
    # Tiles of one height, so that none overlap.
    height = -(-form.rows // -(-form.rows // height_of(machine)))
    tiles = Tiles(machine, form.depth, Matrix(left).at, Panels(right), height)
    return scheduled_function(
        [left, right, out], tiles.loops(form.rows, form.columns, _writing(tiles, Matrix(out)))
    )


def panels_shape(form: Form, machine: Machine) -> tuple[int, int, int]:
    """Return the shape of the packed right operand."""
    width = width_of(machine)
    return -(-form.columns // width), form.depth, width


def _of_matrices(
    form: Form, machine: Machine, left: Matrix, right: Matrix, out: Matrix
) -> tirx.Stmt:
    def left_at(row: Expr, k: Expr) -> Expr:
        return left.at(k, row) if form.left_transposed else left.at(row, k)

    tiles = Tiles(machine, form.depth, left_at, right, copies=True)
    return tiles.loops(form.rows, form.columns, _writing(tiles, out))


def _writing(tiles: Tiles, out: Matrix, first: Expr | None = None) -> Write:
    """Return a function that writes a tile of sums to ``out``, with rows counted from ``first``."""

    def write(sums: Buffer, row: Expr, column: Expr) -> list[tirx.Stmt]:
        top = row if first is None else first + row
        return [tiles.each(lambda r, c: out.put(load(sums, r, c), top + r, column + c))]

    return write


def _of_copied_columns(
    form: Form, machine: Machine, left: Matrix, right: Matrix, out: Matrix
) -> tirx.Stmt:
    """Return the statements of a product that first transposes the right operand into a copy."""
    copy, room = allocate([form.depth, form.columns], DTYPE, "transposed")
    copied = _transposed(right, copy, form.columns, form.columns, form.depth, machine)
    tiles = Tiles(machine, form.depth, left.at, Matrix(copy))
    multiplied = tiles.loops(form.rows, form.columns, _writing(tiles, out))
    return sequence([room, copied, multiplied])


def _block(rows: int, machine: Machine) -> int | None:
    """Return the number of tiles in a block of rows; None if no number is suitable.

    All cores get the same number of blocks, and as few tiles as possible overlap.
    """
    tiles = -(-rows // height_of(machine))
    counts = range(machine.cores, tiles + 1, machine.cores)
    found = [
        (n * -(-tiles // n), n)
        for n in counts
        if _FEWEST <= -(-tiles // n) <= min(_MOST, rows // height_of(machine))
    ]
    return -(-tiles // min(found)[1]) if found else None


def _of_copied_rows(
    form: Form, machine: Machine, tiles_of_block: int, left: Matrix, right: Matrix, out: Matrix
) -> tirx.Stmt:
    """Return a loop over blocks of the result's rows, each of which copies its part of ``left``."""
    height, width = height_of(machine), width_of(machine)
    rows = tiles_of_block * height
    copy, room = allocate([tiles_of_block, form.depth, height], DTYPE, "copied")

    def copied(first: Expr) -> tirx.Stmt:
        def tile(k: Expr, t: Expr) -> tirx.Stmt:
            def element(lane: Expr) -> list[tirx.Stmt]:
                row = first + t * integer(height) + lane
                return [store(copy, left.at(k, row), t, k, lane)]

            return vector_loop(height, element)

        return loop(form.depth, lambda k: [loop(tiles_of_block, lambda t: [tile(k, t)])])

    def multiplied(row: Expr, column: Expr, t: Expr) -> list[tirx.Stmt]:
        tiles = Tiles(machine, form.depth, lambda r, k: load(copy, t, k, r), right)
        return tiles.tile(integer(0), column, _writing(tiles, out, row))

    def block(number: Expr) -> list[tirx.Stmt]:
        first = start_of(number, rows, form.rows)

        def panel(p: Expr) -> list[tirx.Stmt]:
            column = start_of(p, width, form.columns)

            def tile(t: Expr) -> list[tirx.Stmt]:
                return multiplied(first + t * integer(height), column, t)

            return [loop(tiles_of_block, tile)]

        return [room, copied(first), loop(-(-form.columns // width), panel)]

    return loop(-(-form.rows // rows), block, kind_of(machine.cores))


def _of_few_rows(
    form: Form, machine: Machine, left: Matrix, right: Matrix, out: Matrix
) -> tirx.Stmt:
    """Return the statements of the transposed product, ``right`` times the transposed ``left``.

    The few rows of ``left`` are transposed into a copy before.
    """
    width = width_of(machine)
    padded = -(-form.rows // width) * width
    copy, room = allocate([form.depth, padded], DTYPE, "transposed")
    tiles = Tiles(machine, form.depth, right.at, Matrix(copy))

    def write(sums: Buffer, row: Expr, column: Expr) -> list[tirx.Stmt]:
        # Registers hold rows of the tile; memory is needed to read its columns.
        tile, more = allocate([tiles.height, tiles.width], DTYPE, "tile")

        def line(c: Expr) -> list[tirx.Stmt]:
            def element(r: Expr) -> list[tirx.Stmt]:
                return [out.put(load(tile, r, c), column + c, row + r)]

            stored = loop(tiles.height, element, tirx.ForKind.UNROLLED)
            if padded == form.rows:
                return [stored]
            return [tirx.IfThenElse(column + c < integer(form.rows), stored, None)]

        moved = tiles.each(lambda r, c: store(tile, load(sums, r, c), r, c))
        return [more, moved, loop(tiles.width, line)]

    copied = _transposed(left, copy, form.rows, padded, form.depth, machine)
    return sequence([room, copied, tiles.loops(form.columns, padded, write)])


def _transposed(
    rows: Matrix, copy: Buffer, count: int, padded: int, depth: int, machine: Machine
) -> tirx.Stmt:
    """Return a loop that transposes a matrix into ``copy``.

    Args:
        copy: the buffer (depth, padded).
        padded: the number of columns of ``copy``; columns after ``count`` become zero.
    """
    lanes = machine.lanes

    def some(number: Expr) -> list[tirx.Stmt]:
        first = start_of(number, lanes, depth)

        def row(r: Expr) -> list[tirx.Stmt]:
            def element(lane: Expr) -> list[tirx.Stmt]:
                return [store(copy, rows.at(r, first + lane), first + lane, r)]

            return [vector_loop(lanes, element)]

        def none(r: Expr) -> list[tirx.Stmt]:
            zero = tirx.const(0.0, DTYPE)
            return [loop(lanes, lambda lane: [store(copy, zero, first + lane, integer(count) + r)])]

        return [loop(count, row), *([loop(padded - count, none)] if padded > count else [])]

    return loop(-(-depth // lanes), some, kind_of(machine.cores))

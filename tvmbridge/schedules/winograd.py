"""A 3x3 convolution of float32 images, and its data's gradient, by Winograd's algorithm.

The algorithm is described in :mod:`tvmbridge.schedules.winograd_rows`. The gradient of the data is
the same convolution with filters and channels exchanged and the kernel rotated by 180 degrees. Each
core computes blocks of pairs of rows, for a chunk of channels at a time. The input transform runs
once for each chunk, and the kernel transform for each tile of filters. So neither transform is ever
in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import allocate, load, loop, sequence, store, vector_loop
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_operands import DTYPE
from tvmbridge.schedules.product_tiles import Tile, kind_of, start_of
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.winograd_rows import (
    PRODUCTS,
    SIGNS,
    Pairs,
    filled,
    float32,
    of_kernel,
    of_picture,
    tile_of,
)

# Channels whose products are summed before they are added to the results. Their transformed rows
# stay in a core's cache, and rounding errors stay small.
_CHUNK = 32
_CHUNK_BYTES = 400_000
# The fixed cost of a block, as a number of positions: each block reads all kernels.
_BESIDE = 13
# The time of the kernel transforms of a block, as a number of positions. Measured: 22 for 256
# channels, and 67 for 512, whose kernels are not in a core's cache.
_KERNELS = 30
_TAPS = 3


def convolution_body(form: SameConvolution, machine: Machine, *buffers: Buffer) -> tirx.Stmt:
    """Return the loops that compute a convolution or the gradient of its data.

    Args:
        buffers: the operands, and then the result.
    """
    return _Emitter(form, machine, *buffers).loops()


def pairs_of_block(pairs: Pairs, channels: int, width: int, cores: int) -> int:
    """Return the number of pairs of rows in a block, such that all cores get equal work."""
    best: tuple[float, int] | None = None
    for blocks in range(cores, pairs.count + 1, cores):
        size = -(-pairs.count // blocks)
        positions = _positions(pairs, size, width)
        rows = PRODUCTS * min(channels, _CHUNK) * positions * 4
        if rows > _CHUNK_BYTES and size > 1:
            continue
        rounds = -(-pairs.count // (size * cores))
        cost = rounds * (positions + _BESIDE)
        best = min(best or (cost, size), (cost, size))
    return best[1] if best else 1


def multiplications_of_core(form: SameConvolution, machine: Machine) -> int | None:
    """Return the multiplications of a core, for each channel and filter; None without a tile.

    The kernel transforms of a core's blocks are included, as the number of multiplications that
    take as long.
    """
    made = form.channels if form.part is ConvolutionResult.DATA else form.filters
    given = form.filters if form.part is ConvolutionResult.DATA else form.channels
    tile = tile_of(made, machine)
    if tile is None:
        return None
    pairs = Pairs(form, machine.lanes)
    size = pairs_of_block(pairs, given, tile.width, machine.cores)
    rounds = -(-pairs.count // (size * machine.cores))
    return rounds * (_positions(pairs, size, tile.width) + _KERNELS) * PRODUCTS * _TAPS


def _positions(pairs: Pairs, size: int, width: int) -> int:
    """Return the number of positions in tiles of ``width`` that cover ``size`` pairs of rows."""
    return -(-(size * pairs.stride - 1) // width) * width


@dataclass(frozen=True)
class _Chunk:
    """A chunk of input channels, with their transformed rows and kernels.

    - ``first``: the first channel.
    - ``count``: the number of channels.
    - ``rows``: the buffer of the input transform.
    - ``kernels``: the buffer of the kernel transform for one tile of filters.
    """

    first: Expr
    count: int
    rows: Buffer
    kernels: Buffer


class _Emitter:
    def __init__(self, form: SameConvolution, machine: Machine, *buffers: Buffer) -> None:
        self.pictures, self.weight, *bias, self.out = buffers
        self.bias = bias[0] if bias else None
        self.form, self.machine, self.turned = form, machine, form.part is ConvolutionResult.DATA
        self.pairs = Pairs(form, machine.lanes)
        given, made = form.channels, form.filters
        self.given, self.made = (made, given) if self.turned else (given, made)
        tile = tile_of(self.made, machine)
        assert tile is not None
        self.tile: Tile = tile
        self.size = pairs_of_block(self.pairs, self.given, tile.width, machine.cores)
        self.positions = _positions(self.pairs, self.size, tile.width)

    def loops(self) -> tirx.Stmt:
        blocks = -(-self.pairs.count // self.size)
        return loop(blocks, self._block, kind_of(self.machine.cores))

    def _block(self, block: Expr) -> list[tirx.Stmt]:
        first = start_of(block, self.size, self.pairs.count)
        # The taps of the last tile read up to one vector beyond it.
        behind = self.positions + self.machine.lanes
        count = min(_CHUNK, self.given)
        rows, room = allocate([PRODUCTS, count, behind], DTYPE, "rows")
        kernels, more = allocate([PRODUCTS, self.tile.height, count * _TAPS], DTYPE, "kernels")
        sums, most = allocate([2, self.made, self.positions], DTYPE, "sums")

        def chunk(start: Expr, channels: int) -> list[tirx.Stmt]:
            part = _Chunk(start, channels, rows, kernels)
            tiles = loop(self.made // self.tile.height, lambda t: self._filters(t, part, sums))
            return [loop(channels, lambda c: self._picture(c, first, part)), tiles]

        whole, rest = divmod(self.given, count)
        return [
            room,
            more,
            most,
            loop(2, lambda row: [loop(self.made, lambda k: [self._cleared(sums, row, k)])]),
            loop(whole, lambda n: chunk(n * integer(count), count)),
            *(chunk(integer(whole * count), rest) if rest else []),
            loop(self.made, lambda k: self._results(k, first, sums)),
        ]

    def _cleared(self, sums: Buffer, row: Expr, k: Expr) -> tirx.Stmt:
        value = float32(0.0) if self.bias is None else load(self.bias, k)
        return filled(value, sums, self.machine.lanes, row, k)

    def _picture(self, c: Expr, first: Expr, chunk: _Chunk) -> list[tirx.Stmt]:
        """Return the statements of the input transform for one channel of the block's rows."""
        stride, end = self.pairs.stride, self.size * self.pairs.stride

        def pair(number: Expr) -> list[tirx.Stmt]:
            begin = number * integer(stride)

            def element(x: Expr) -> list[tirx.Stmt]:
                lines = self.pairs.read(self.pictures, chunk.first + c, first + number, x, around=1)
                values = of_picture(lines)
                return [
                    store(chunk.rows, value, integer(i), c, begin + integer(1) + x)
                    for i, value in enumerate(values)
                ]

            return [*self._zeros(chunk, c, begin, 1), self.pairs.line(element)]

        behind = int(chunk.rows.shape[-1]) - end
        return [loop(self.size, pair), *self._zeros(chunk, c, integer(end), behind)]

    def _zeros(self, chunk: _Chunk, c: Expr, start: Expr, count: int) -> list[tirx.Stmt]:
        def zero(place: Expr) -> list[tirx.Stmt]:
            return [store(chunk.rows, float32(0.0), integer(i), c, place) for i in range(PRODUCTS)]

        return [loop(count, zero, start=start)]

    def _filters(self, tile: Expr, chunk: _Chunk, sums: Buffer) -> list[tirx.Stmt]:
        """Return the statements that add a tile of filters to the sums of the block."""
        first = tile * integer(self.tile.height)
        panels = self.positions // self.tile.width
        return [
            loop(self.tile.height, lambda row: [self._kernel(row, first, chunk)]),
            loop(
                PRODUCTS,
                lambda i: [loop(panels, lambda p: self._panel(i, p, first, chunk, sums))],
            ),
        ]

    def _kernel(self, row: Expr, first: Expr, chunk: _Chunk) -> tirx.Stmt:
        """Return the loop of the kernel transform for one filter."""

        def channel(c: Expr) -> list[tirx.Stmt]:
            places = chunk.first + c, first + row
            place = places if self.turned else places[::-1]
            order = (2, 1, 0) if self.turned else (0, 1, 2)

            def tap(t: Expr) -> list[tirx.Stmt]:
                lines = [load(self.weight, *place, integer(y), t) for y in order]
                return [
                    store(chunk.kernels, value, integer(i), row, c * integer(_TAPS) + t)
                    for i, value in enumerate(of_kernel(lines))
                ]

            return [vector_loop(_TAPS, tap)]

        return loop(chunk.count, channel)

    def _panel(
        self, product: Expr, panel: Expr, first: Expr, chunk: _Chunk, sums: Buffer
    ) -> list[tirx.Stmt]:
        found, room = self.tile.registers("products")
        begin = panel * integer(self.tile.width)

        def terms(c: Expr) -> list[Callable[[Expr, Expr], Expr]]:
            def term(tap: int) -> Callable[[Expr, Expr], Expr]:
                # A rotated kernel is read from its end.
                ahead = integer(_TAPS - 1 - tap if self.turned else tap)

                def multiplied(row: Expr, column: Expr) -> Expr:
                    factor = load(chunk.kernels, product, row, c * integer(_TAPS) + integer(tap))
                    return factor * load(chunk.rows, product, c, begin + ahead + column)

                return multiplied

            return [term(tap) for tap in range(_TAPS)]

        def added(row: int, sign: int) -> tirx.Stmt:
            def element(r: Expr, c: Expr) -> tirx.Stmt:
                place = integer(row), first + r, begin + c
                before, value = load(sums, *place), load(found, r, c)
                return store(sums, before + value if sign > 0 else before - value, *place)

            return self.tile.each(element)

        def all_added(i: int) -> tirx.Stmt:
            here = sequence([added(*part) for part in SIGNS[i]])
            if i + 1 == PRODUCTS:
                return here
            return tirx.IfThenElse(product.equal(integer(i)), here, all_added(i + 1))

        return [room, *self.tile.summed(found, chunk.count, terms), all_added(0)]

    def _results(self, k: Expr, first: Expr, sums: Buffer) -> list[tirx.Stmt]:
        """Return the statements that write the block's rows of one channel of the result."""

        def pair(number: Expr) -> list[tirx.Stmt]:
            begin = number * integer(self.pairs.stride)

            def row(offset: int) -> tirx.Stmt:
                def line(picture: Expr, y: Expr) -> tirx.Stmt:
                    def element(x: Expr) -> list[tirx.Stmt]:
                        value = load(sums, integer(offset), k, begin + x)
                        return [store(self.out, value, picture, k, y, x)]

                    return self.pairs.line(element)

                return self.pairs.written(first + number, offset, line)

            return [row(0), row(1)]

        return [loop(self.size, pair)]

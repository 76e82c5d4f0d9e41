"""The gradient of the weight of a 3x3 convolution of float32, by Winograd's algorithm.

The algorithm is described in :mod:`tvmbridge.schedules.winograd_rows`. The four products are summed
over all positions of all images. At the end, the three rows of each kernel's gradient are computed
from the sums. The images are first copied into panels of channels, so that the vectors of a tile
run along channels.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.kernels.convolution_form import SameConvolution
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import allocate, load, loop, sequence, store
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_operands import DTYPE
from tvmbridge.schedules.product_tiles import PARTS, Tile, kind_of, start_of
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.winograd_rows import (
    PRODUCTS,
    Pairs,
    filled,
    float32,
    in_vectors,
    kernel_gradient,
    of_cotangents,
    of_picture,
    tile_of,
)

# Positions whose products are summed before they are added to the results; they fit in a cache.
_CHUNK = 96
_TAPS = 3


def weight_gradient_body(form: SameConvolution, machine: Machine, *buffers: Buffer) -> tirx.Stmt:
    """Return the loops that compute the weight's gradient.

    Args:
        buffers: cotangent, data and result.
    """
    return _WeightEmitter(form, machine, *buffers).loops()


class _WeightEmitter:
    def __init__(self, form: SameConvolution, machine: Machine, *buffers: Buffer) -> None:
        self.cotangent, self.data, self.out = buffers
        self.form, self.kind = form, kind_of(machine.cores)
        self.pairs = Pairs(form, machine.lanes)
        tile = tile_of(form.filters, machine)
        assert tile is not None
        self.tile: Tile = tile
        self.panels = -(-form.channels // tile.width)
        self.positions = self.pairs.count * self.pairs.stride
        self.parts = self._parts(PARTS * machine.cores)
        extents = [PRODUCTS, self.panels, self.positions + _TAPS - 1, tile.width]
        self.columns, room = allocate(extents, DTYPE, "columns")
        self.lines, more = allocate([PRODUCTS, form.filters, self.positions], DTYPE, "lines")
        extents = [PRODUCTS, self.panels, _TAPS, form.filters, tile.width]
        self.sums, most = allocate(extents, DTYPE, "sums")
        self.rooms = [room, more, most]

    def _parts(self, wanted: int) -> int:
        """Return the number of equal parts of the filters, such that all cores have work."""
        tiles = self.form.filters // self.tile.height
        enough = -(-wanted // (PRODUCTS * self.panels))
        return next((n for n in range(enough, tiles) if tiles % n == 0), tiles)

    def loops(self) -> tirx.Stmt:
        units = PRODUCTS * self.panels * self.parts
        return sequence(
            [
                *self.rooms,
                loop(self.pairs.count, self._pictures, self.kind),
                loop(PRODUCTS, lambda i: [loop(self.panels, lambda p: self._behind(i, p))]),
                loop(self.form.filters, self._cotangents, self.kind),
                loop(units, self._unit, self.kind),
                loop(self.form.filters, self._gradients, self.kind),
            ]
        )

    def _vectors(self, element: Callable[[Expr], list[tirx.Stmt]]) -> tirx.Stmt:
        """Return a vector loop of ``element(column)`` over the columns of a panel."""
        return in_vectors(self.tile.width, self.tile.lanes, element)

    def _first(self, panel: Expr) -> Expr:
        return start_of(panel, self.tile.width, self.form.channels)

    def _pictures(self, pair: Expr) -> list[tirx.Stmt]:
        """Return the statements of the input transform for a pair's rows, written transposed."""
        # An odd distance, because lines at distances of a multiple of a page evict one another.
        apart = self.form.width | 1
        rows, room = allocate([PRODUCTS, self.tile.width, apart], DTYPE, "rows")
        begin = pair * integer(self.pairs.stride)

        def panel(p: Expr) -> list[tirx.Stmt]:
            def computed(c: Expr) -> list[tirx.Stmt]:
                def element(x: Expr) -> list[tirx.Stmt]:
                    found = self.pairs.read(self.data, self._first(p) + c, pair, x, around=1)
                    values = of_picture(found)
                    return [store(rows, v, integer(i), c, x) for i, v in enumerate(values)]

                return [self.pairs.line(element)]

            def moved(x: Expr) -> list[tirx.Stmt]:
                def element(c: Expr) -> list[tirx.Stmt]:
                    return [
                        store(self.columns, load(rows, i, c, x), i, p, begin + integer(1) + x, c)
                        for i in map(integer, range(PRODUCTS))
                    ]

                return [self._vectors(element)]

            zeros = [self._zeros(integer(i), p, begin) for i in range(PRODUCTS)]
            return [*zeros, loop(self.tile.width, computed), loop(self.form.width, moved)]

        return [room, loop(self.panels, panel)]

    def _zeros(self, product: Expr, panel: Expr, position: Expr) -> tirx.Stmt:
        return filled(float32(0.0), self.columns, self.tile.lanes, product, panel, position)

    def _behind(self, product: Expr, panel: Expr) -> list[tirx.Stmt]:
        places = [integer(self.positions + n) for n in range(_TAPS - 1)]
        return [self._zeros(product, panel, place) for place in places]

    def _cotangents(self, k: Expr) -> list[tirx.Stmt]:
        """Return the statements of the cotangent transform for one filter."""

        def pair(number: Expr) -> list[tirx.Stmt]:
            begin = number * integer(self.pairs.stride)

            def element(x: Expr) -> list[tirx.Stmt]:
                values = of_cotangents(self.pairs.read(self.cotangent, k, number, x))
                return [
                    store(self.lines, value, integer(i), k, begin + x)
                    for i, value in enumerate(values)
                ]

            end = begin + integer(self.form.width)
            zeros = [store(self.lines, float32(0.0), integer(i), k, end) for i in range(PRODUCTS)]
            return [self.pairs.line(element), *zeros]

        return [loop(self.pairs.count, pair)]

    def _unit(self, unit: Expr) -> list[tirx.Stmt]:
        """Return the statements that sum one product for a panel of channels and some filters."""
        panels, parts = integer(self.panels), integer(self.parts)
        place = unit // (panels * parts), unit // parts % panels
        tiles = self.form.filters // self.tile.height // self.parts
        first = unit % parts * integer(tiles * self.tile.height)

        def cleared(tap: Expr) -> list[tirx.Stmt]:
            def row(k: Expr) -> list[tirx.Stmt]:
                return [filled(float32(0.0), self.sums, self.tile.lanes, *place, tap, first + k)]

            return [loop(tiles * self.tile.height, row)]

        def chunk(start: Expr, length: int) -> list[tirx.Stmt]:
            def tile(t: Expr) -> list[tirx.Stmt]:
                k = first + t * integer(self.tile.height)
                return [loop(_TAPS, lambda tap: self._added(place, tap, k, start, length))]

            return [loop(tiles, tile)]

        whole, rest = divmod(self.positions, _CHUNK)
        return [
            loop(_TAPS, cleared),
            *([loop(whole, lambda n: chunk(n * integer(_CHUNK), _CHUNK))] if whole else []),
            *(chunk(integer(whole * _CHUNK), rest) if rest else []),
        ]

    def _added(
        self, place: tuple[Expr, Expr], tap: Expr, first: Expr, start: Expr, length: int
    ) -> list[tirx.Stmt]:
        """Return the statements that add ``length`` positions to the sums of a tile."""
        found, room = self.tile.registers("products")

        def terms(i: Expr) -> list[Callable[[Expr, Expr], Expr]]:
            position = start + i

            def term(row: Expr, column: Expr) -> Expr:
                factor = load(self.lines, place[0], first + row, position)
                return factor * load(self.columns, *place, position + tap, column)

            return [term]

        def add(row: Expr, column: Expr) -> tirx.Stmt:
            where = *place, tap, first + row, column
            return store(self.sums, load(self.sums, *where) + load(found, row, column), *where)

        return [room, *self.tile.summed(found, length, terms), self.tile.each(add)]

    def _gradients(self, k: Expr) -> list[tirx.Stmt]:
        def panel(p: Expr) -> list[tirx.Stmt]:
            def tap(t: Expr) -> list[tirx.Stmt]:
                def element(c: Expr) -> list[tirx.Stmt]:
                    products = [load(self.sums, integer(i), p, t, k, c) for i in range(PRODUCTS)]
                    return [
                        store(self.out, value, k, self._first(p) + c, integer(y), t)
                        for y, value in enumerate(kernel_gradient(products))
                    ]

                return [self._vectors(element)]

            return [loop(_TAPS, tap)]

        return [loop(self.panels, panel)]

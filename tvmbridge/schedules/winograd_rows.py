"""Winograd's algorithm over the rows of images: pairs of rows, and their transforms.

Two rows of a 3x3 convolution are computed from four products; the definition needs six. This is
F(2, 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). With rows
``d0`` to ``d3`` of the image and ``g0`` to ``g2`` of the kernel ::

    m0 = (d0 - d2) g0                     row 0 = m0 + m1 + m2
    m1 = (d1 + d2) (g0 + g1 + g2) / 2     row 1 = m1 - m2 - m3
    m2 = (d2 - d1) (g0 - g1 + g2) / 2
    m3 = (d1 - d3) g2

where a product is the convolution of a row with three numbers. No vector is shuffled. A row of the
result depends only on the rows that it depends on by definition, and rounding errors are similar.

In memory the rows follow one another with one zero between them, which pads the end of one row and
the start of the next. Tiles cover all rows as if they were one long row. Results at the positions
of the zeros are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.kernels.convolution_form import SameConvolution
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import (
    load,
    loop,
    over_vectors,
    power_of_two_below,
    store,
    vector_loop,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_operands import DTYPE
from tvmbridge.schedules.product_tiles import Tile, height_of
from tvmbridge.schedules.reader import Buffer

PRODUCTS = 4
SIGNS = (((0, 1),), ((0, 1), (1, 1)), ((0, 1), (1, -1)), ((1, -1),))
"""For each product: the rows of the pair that it is added to, and the sign."""

# The smallest tile height that hides the latency of multiplications.
_LOWEST = 4


def float32(value: float) -> Expr:
    """Return a float32 constant."""
    return tirx.const(value, DTYPE)


def of_picture(rows: list[Expr]) -> list[Expr]:
    """Return the input transform: the factor of each product, from four rows of an image."""
    d0, d1, d2, d3 = rows
    return [d0 - d2, d1 + d2, d2 - d1, d1 - d3]


def of_kernel(rows: list[Expr]) -> list[Expr]:
    """Return the kernel transform: the factor of each product, from the three rows of a kernel."""
    g0, g1, g2 = rows
    both, half = g0 + g2, float32(0.5)
    return [g0, (both + g1) * half, (both - g1) * half, g2]


def of_cotangents(rows: list[Expr]) -> list[Expr]:
    """Return the factor of each product for the kernel's gradient, from two rows of a cotangent."""
    a, b = rows
    half = float32(0.5)
    return [a, (a + b) * half, (a - b) * half, float32(0.0) - b]


def kernel_gradient(products: list[Expr]) -> list[Expr]:
    """Return the gradient of a kernel's three rows from the summed products.

    The map is the transpose of :func:`of_kernel`, without the factors in :func:`of_cotangents`.
    """
    m0, m1, m2, m3 = products
    return [m0 + m1 + m2, m1 - m2, m1 + m2 + m3]


def tile_of(filters: int, machine: Machine) -> Tile | None:
    """Return the highest tile that divides the filters, or None: overlaps would add sums twice."""
    for height in range(height_of(machine), _LOWEST - 1, -1):
        if filters % height == 0:
            return Tile(height, machine.lanes)
    return None


@dataclass(frozen=True)
class Pairs:
    """The pairs of rows of all images in a batch, numbered consecutively.

    - ``form``: the convolution.
    - ``lanes``: the number of vector lanes.
    """

    form: SameConvolution
    lanes: int

    @property
    def of_picture(self) -> int:
        return -(-self.form.height // 2)

    @property
    def count(self) -> int:
        return self.form.batch * self.of_picture

    @property
    def stride(self) -> int:
        """The distance between the starts of two rows in memory: the width and one zero."""
        return self.form.width + 1

    def read(
        self, pictures: Buffer, channel: Expr, pair: Expr, x: Expr, around: int = 0
    ) -> list[Expr]:
        """Return column ``x`` of the pair's rows and ``around`` more, zeros outside the image."""
        picture, first = self.place(pair)

        def row(offset: int) -> Expr:
            value = load(pictures, picture, channel, first + integer(offset), x)
            if offset < 0:
                return tirx.if_then_else(first >= integer(-offset), value, float32(0.0))
            if self._is_inside(offset):
                return value
            inside = first < integer(self.form.height - offset)
            return tirx.if_then_else(inside, value, float32(0.0))

        return [row(offset) for offset in range(-around, 2 + around)]

    def written(self, pair: Expr, row: int, line: Callable[[Expr, Expr], tirx.Stmt]) -> tirx.Stmt:
        """Return the statement ``line(image, y)`` for one row of the pair, if the image has it."""
        picture, first = self.place(pair)
        y = first + integer(row)
        statement = line(picture, y)
        if self._is_inside(row):
            return statement
        return tirx.IfThenElse(y < integer(self.form.height), statement, None)

    def line(self, element: Callable[[Expr], list[tirx.Stmt]]) -> tirx.Stmt:
        """Return a vector loop of ``element(x)`` over a row; the last vector may overlap."""
        lanes = min(self.lanes, power_of_two_below(self.form.width))

        def vector(base: Expr, fresh: Expr | None) -> list[tirx.Stmt]:
            return [vector_loop(lanes, lambda lane: element(base + lane))]

        return over_vectors(self.form.width, lanes, vector)

    def place(self, pair: Expr) -> tuple[Expr, Expr]:
        """Return the number of the pair's image, and the pair's first row in the image."""
        count = integer(self.of_picture)
        return pair // count, pair % count * integer(2)

    def _is_inside(self, offset: int) -> bool:
        """Whether the row at ``offset`` from the first is inside the image for every pair."""
        return offset == 0 or (offset == 1 and self.form.height % 2 == 0)


def filled(value: Expr, buffer: Buffer, lanes: int, *indices: Expr) -> tirx.Stmt:
    """Return a loop that fills the last dimension, a multiple of ``lanes``, with ``value``."""
    extent = int(buffer.shape[-1])
    return in_vectors(extent, lanes, lambda place: [store(buffer, value, *indices, place)])


def in_vectors(extent: int, lanes: int, element: Callable[[Expr], list[tirx.Stmt]]) -> tirx.Stmt:
    """Return a vector loop of ``element(place)`` over ``extent``, which ``lanes`` must divide."""

    def vector(v: Expr) -> list[tirx.Stmt]:
        return [vector_loop(lanes, lambda lane: element(v * integer(lanes) + lane))]

    return loop(extent // lanes, vector)

"""Winograd's algorithm along the rows of pictures: pairs of rows, and what is made of them.

Two rows of a 3x3 convolution are made of four products, where the definition has six (F(2, 3) of
Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016): with rows ``d0`` to
``d3`` of the picture and ``g0`` to ``g2`` of the kernel ::

    m0 = (d0 - d2) g0                     row 0 = m0 + m1 + m2
    m1 = (d1 + d2) (g0 + g1 + g2) / 2     row 1 = m1 - m2 - m3
    m2 = (d2 - d1) (g0 - g1 + g2) / 2
    m3 = (d1 - d3) g2

where a product is the convolution of a row with three numbers. It takes no vector apart, a row of
the result depends on those rows alone that it depends on by definition, and errors are like those
of the definition.

In memory the rows follow one another with one zero between them, the end of one and the beginning
of the next. Tiles of a result go over all of them as over one row; what they find for the places
of the zeros belongs to nothing.
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
from tvmbridge.schedules.product_tiles import DTYPE, Tile, height_of
from tvmbridge.schedules.reader import Buffer

PRODUCTS = 4
SIGNS = (((0, 1),), ((0, 1), (1, 1)), ((0, 1), (1, -1)), ((1, -1),))
"""Of each product: the rows of the pair that it is a part of, and its sign there."""

# The lowest tile that hides the latency of multiplications.
_LOWEST = 4


def float32(value: float) -> Expr:
    """A float32 constant."""
    return tirx.const(value, DTYPE)


def of_picture(rows: list[Expr]) -> list[Expr]:
    """What each product multiplies of four rows of a picture."""
    d0, d1, d2, d3 = rows
    return [d0 - d2, d1 + d2, d2 - d1, d1 - d3]


def of_kernel(rows: list[Expr]) -> list[Expr]:
    """What each product multiplies of the three rows of a kernel."""
    g0, g1, g2 = rows
    both, half = g0 + g2, float32(0.5)
    return [g0, (both + g1) * half, (both - g1) * half, g2]


def of_cotangents(rows: list[Expr]) -> list[Expr]:
    """What each product multiplies of two rows of a cotangent, for the kernel's gradient."""
    a, b = rows
    half = float32(0.5)
    return [a, (a + b) * half, (a - b) * half, float32(0.0) - b]


def kernel_gradient(products: list[Expr]) -> list[Expr]:
    """The gradient of the three rows of a kernel, by sums of products: the transpose of above."""
    m0, m1, m2, m3 = products
    return [m0 + m1 + m2, m1 - m2, m1 + m2 + m3]


def tile_of(filters: int, machine: Machine) -> Tile | None:
    """The highest tile that divides the filters, since tiles that overlap would add up twice."""
    for height in range(height_of(machine), _LOWEST - 1, -1):
        if filters % height == 0:
            return Tile(height, machine.lanes)
    return None


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows of pictures, numbered through the batch."""

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
        """From the beginning of a row to that of the next one."""
        return self.form.width + 1

    def read(
        self, pictures: Buffer, channel: Expr, pair: Expr, x: Expr, around: int = 0
    ) -> list[Expr]:
        """The pair's rows, and ``around`` more on both sides; zeros where the picture has none."""
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
        """``line(picture, y)`` for one row of the pair, unless the picture ends before it."""
        picture, first = self.place(pair)
        y = first + integer(row)
        statement = line(picture, y)
        if self._is_inside(row):
            return statement
        return tirx.IfThenElse(y < integer(self.form.height), statement, None)

    def line(self, element: Callable[[Expr], list[tirx.Stmt]]) -> tirx.Stmt:
        """``element(x)`` for all of a row, in vectors, of which the last may overlap."""
        lanes = min(self.lanes, power_of_two_below(self.form.width))

        def vector(base: Expr, fresh: Expr | None) -> list[tirx.Stmt]:
            return [vector_loop(lanes, lambda lane: element(base + lane))]

        return over_vectors(self.form.width, lanes, vector)

    def place(self, pair: Expr) -> tuple[Expr, Expr]:
        """The picture, and the first row of the pair in it."""
        count = integer(self.of_picture)
        return pair // count, pair % count * integer(2)

    def _is_inside(self, offset: int) -> bool:
        """Whether every pair has this row of its picture."""
        return offset == 0 or (offset == 1 and self.form.height % 2 == 0)


def filled(value: Expr, buffer: Buffer, lanes: int, *indices: Expr) -> tirx.Stmt:
    """All of the last dimension of ``buffer`` becomes ``value``; ``lanes`` divide it."""
    extent = int(buffer.shape[-1])
    return in_vectors(extent, lanes, lambda place: [store(buffer, value, *indices, place)])


def in_vectors(extent: int, lanes: int, element: Callable[[Expr], list[tirx.Stmt]]) -> tirx.Stmt:
    """``element(place)`` for all of ``extent``, which ``lanes`` divide."""

    def vector(v: Expr) -> list[tirx.Stmt]:
        return [vector_loop(lanes, lambda lane: element(v * integer(lanes) + lane))]

    return loop(extent // lanes, vector)

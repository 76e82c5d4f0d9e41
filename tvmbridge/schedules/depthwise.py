"""Depthwise convolutions of float32 images: each channel has kernels of its own.

A channel is copied into a buffer with edges of zeros, so that the loops over the kernel have no
conditions. With a stride, columns with one remainder follow one another in the buffer, so that
vectors are read without gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules import scheduled_function
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import (
    allocate,
    load,
    loop,
    over_vectors,
    power_of_two_below,
    sequence,
    store,
    vector_loop,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_operands import DTYPE
from tvmbridge.schedules.product_tiles import kind_of, start_of
from tvmbridge.schedules.reader import Buffer

# Rows of a tile: so many sums hide the latency of multiplications.
_HEIGHT = 4
_MOST_TAPS = 64
_NARROWEST = 4
_MOST_ELEMENTS = 1 << 18

Pair = tuple[int, int]


@dataclass(frozen=True)
class Depthwise:
    """A depthwise convolution; pairs are of height and width.

    - ``batch``, ``channels``: the sizes of the data.
    - ``each``: the number of results of a channel.
    - ``extents``: the size of an image.
    - ``kernel``, ``stride``, ``padding``, ``dilation``: as in PyTorch.
    """

    batch: int
    channels: int
    each: int
    extents: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def padded(self) -> Pair:
        """The size of an image with its edges."""
        height, width = (n + 2 * p for n, p in zip(self.extents, self.padding, strict=True))
        return height, width

    @property
    def places(self) -> Pair:
        """The size of a result."""
        sizes = zip(self.padded, self.kernel, self.stride, self.dilation, strict=True)
        height, width = ((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in sizes)
        return height, width

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of data, weight and result."""
        filters = self.channels * self.each
        data = (self.batch, self.channels, *self.extents)
        return data, (filters, 1, *self.kernel), (self.batch, filters, *self.places)


def fits(form: Depthwise) -> bool:
    """Whether the generated loops support this convolution."""
    height, width = form.places
    small = prod(form.kernel) <= _MOST_TAPS and prod(form.padded) <= _MOST_ELEMENTS
    return small and width >= _NARROWEST and height > 0 and min(form.extents) > 0


def depthwise(form: Depthwise, machine: Machine) -> tirx.PrimFunc:
    """Return the TIR function of a convolution for which :func:`fits` is true.

    Its parameters are data, weight and result.
    """
    data, weight, out = (
        tirx.decl_buffer([integer(n) for n in shape], DTYPE, name)
        for shape, name in zip(form.shapes, ("data", "weight", "out"), strict=True)
    )
    emitter = _ChannelLoops(form, machine, data, weight, out)
    count = form.batch * form.channels
    body = loop(count, emitter.channel, kind_of(machine.cores))
    return scheduled_function([data, weight, out], body)


class _ChannelLoops:
    def __init__(
        self, form: Depthwise, machine: Machine, data: Buffer, weight: Buffer, out: Buffer
    ) -> None:
        self.form, self.data, self.weight, self.out = form, data, weight, out
        height, width = form.places
        self.height = min(_HEIGHT, height)
        self.lanes = min(machine.lanes, power_of_two_below(width))
        # The last vector reads no further than the last column.
        self.columns = -(-form.padded[1] // form.stride[1])

    def channel(self, number: Expr) -> list[tirx.Stmt]:
        form = self.form
        image, channel = number // integer(form.channels), number % integer(form.channels)
        shape = [form.padded[0], form.stride[1], self.columns]
        edged, room = allocate(shape, DTYPE, "edged")

        def filtered(number: Expr) -> list[tirx.Stmt]:
            return [self._filtered(edged, image, channel * integer(form.each) + number)]

        copied = self._copied(edged, image, channel)
        return [room, self._zeros(edged), copied, loop(form.each, filtered)]

    def _zeros(self, edged: Buffer) -> tirx.Stmt:
        def line(y: Expr) -> list[tirx.Stmt]:
            def zero(x: Expr, phase: Expr) -> list[tirx.Stmt]:
                return [store(edged, tirx.const(0.0, DTYPE), y, phase, x)]

            return [loop(self.form.stride[1], lambda p: [loop(self.columns, lambda x: zero(x, p))])]

        return loop(self.form.padded[0], line)

    def _copied(self, edged: Buffer, image: Expr, channel: Expr) -> tirx.Stmt:
        """Return the loop that copies a channel into ``edged``, behind its edges."""
        (height, width), (top, left) = self.form.extents, self.form.padding
        step = self.form.stride[1]

        def line(y: Expr) -> list[tirx.Stmt]:
            return [part(y, phase) for phase in range(step) if phase < width]

        def part(y: Expr, phase: int) -> tirx.Stmt:
            place, column = (phase + left) % step, (phase + left) // step

            def element(i: Expr) -> list[tirx.Stmt]:
                x = i * integer(step) + integer(phase)
                value = load(self.data, image, channel, y, x)
                at = (y + integer(top), integer(place), i + integer(column))
                return [store(edged, value, *at)]

            return loop(-(-(width - phase) // step), element)

        return loop(height, line)

    def _filtered(self, edged: Buffer, image: Expr, filter_: Expr) -> tirx.Stmt:
        height, width = self.form.places

        def rows(number: Expr) -> list[tirx.Stmt]:
            first = start_of(number, self.height, height)

            def vector(base: Expr, fresh: Expr | None) -> list[tirx.Stmt]:
                return self._tile(edged, image, filter_, first, base)

            return [over_vectors(width, self.lanes, vector)]

        return loop(-(-height // self.height), rows)

    def _tile(
        self, edged: Buffer, image: Expr, filter_: Expr, first: Expr, base: Expr
    ) -> list[tirx.Stmt]:
        form = self.form
        sums, room = allocate([self.height, self.lanes], DTYPE, "sums")
        places = [integer(row) for row in range(self.height)]

        def added(row: Expr, ky: int, kx: int) -> tirx.Stmt:
            column, phase = divmod(kx * form.dilation[1], form.stride[1])
            y = (first + row) * integer(form.stride[0]) + integer(ky * form.dilation[0])

            def element(lane: Expr) -> list[tirx.Stmt]:
                value = load(edged, y, integer(phase), base + integer(column) + lane)
                factor = load(self.weight, filter_, integer(0), integer(ky), integer(kx))
                return [store(sums, load(sums, row, lane) + value * factor, row, lane)]

            return vector_loop(self.lanes, element)

        def each(element: Callable[[Expr, Expr], tirx.Stmt], row: Expr) -> tirx.Stmt:
            return vector_loop(self.lanes, lambda lane: [element(row, lane)])

        def cleared(row: Expr, lane: Expr) -> tirx.Stmt:
            return store(sums, tirx.const(0.0, DTYPE), row, lane)

        def written(row: Expr, lane: Expr) -> tirx.Stmt:
            value = load(sums, row, lane)
            return store(self.out, value, image, filter_, first + row, base + lane)

        taps = [(ky, kx) for ky in range(form.kernel[0]) for kx in range(form.kernel[1])]
        return [
            room,
            *(each(cleared, row) for row in places),
            sequence([added(row, *tap) for tap in taps for row in places]),
            *(each(written, row) for row in places),
        ]

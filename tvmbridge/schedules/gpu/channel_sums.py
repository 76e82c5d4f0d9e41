"""The sums over all pixels that a batch norm of an image with channels last needs.

A thread has a few neighbouring channels, and every n-th row (pixel) of its block. A second kernel
combines the values of the blocks in a fixed order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import gcd

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules import scheduled_function
from tvmbridge.schedules.bfloat16 import from_memory
from tvmbridge.schedules.gpu.threads import WARP, allocate_in, barrier, launch, when
from tvmbridge.schedules.gpu.vectors import side_by_side
from tvmbridge.schedules.indexing import Indexer, index_var, integer
from tvmbridge.schedules.loops import load, loop, sequence, store
from tvmbridge.schedules.reader import Buffer

_FLOAT = "float32"
# Neighbouring channels of a thread, threads of a block, rows of a thread, and the most blocks.
_LANES, _THREADS, _EACH, _BLOCKS = 4, 512, 4, 264
# Threads of a channel that combine the values of the blocks.
_COMBINING = 16
_ZERO, _ONE = integer(0), integer(1)

Values = Sequence[Expr]


def channel_statistics(
    rows: int, channels: int, dtype: str, eps: float, momentum: float | None
) -> tirx.PrimFunc:
    """Return the scheduled function of the statistics of a batch norm in training.

    Its parameters are x (rows, channels) and vectors of float32: the running mean and variance,
    and the results, which are the mean, 1 / sqrt(variance + eps), and the new running mean and
    variance. Without a momentum there are no running statistics.
    """
    x = _matrix(rows, channels, dtype, "x")
    running = () if momentum is None else ("mean", "variance")
    old = [_vector(channels, f"old_{name}") for name in running]
    names = ["batch_mean", "inverse_root", *(f"new_{name}" for name in running)]
    results = [_vector(channels, name) for name in names]
    statistics = _Statistics(x, old, results, eps, momentum or 0.0)
    return scheduled_function([x, *old, *results], sequence(statistics.kernels()))


def channel_gradients(rows: int, channels: int, dtypes: tuple[str, str]) -> tirx.PrimFunc:
    """Return the scheduled function of the gradients of a batch norm's bias and weight.

    Its parameters are the cotangent and x (rows, channels) of ``dtypes``, and vectors of float32:
    the mean, 1 / sqrt(variance + eps), and the results for the bias and for the weight.
    """
    read = [_matrix(rows, channels, d, n) for d, n in zip(dtypes, ("grad", "x"), strict=True)]
    mean, inverse = _vector(channels, "mean"), _vector(channels, "inverse_root")
    results = [_vector(channels, name) for name in ("grad_bias", "grad_weight")]
    gradients = _Gradients(read, mean, inverse, results)
    parameters = [*read, mean, inverse, *results]
    return scheduled_function(parameters, sequence(gradients.kernels()))


class _Sums(ABC):
    """Generates the kernels of sums over the rows of the matrices ``read``.

    A subclass has ``size`` values for each channel, in float32.
    """

    size: int

    def __init__(self, read: Sequence[Buffer]) -> None:
        self.read = read
        self.rows, self.channels = (int(n) for n in read[0].shape)
        self.lanes = gcd(_LANES, self.channels)
        groups = self.channels // self.lanes
        self.tiles = -(-groups // WARP)
        self.across = -(-groups // self.tiles)
        self.width = self.across * self.lanes
        self.height = min(max(_THREADS // self.across, self.lanes), _THREADS // 8)
        wanted = min(-(-self.rows // (self.height * _EACH)), max(1, _BLOCKS // self.tiles))
        self.stretch = -(-self.rows // wanted)
        self.parts = -(-self.rows // self.stretch)
        self.indexer = Indexer()
        self.partial = _vector(self.parts * self.size * self.channels, "parts")

    @abstractmethod
    def begun(self, values: Values) -> list[Expr]:
        """Return a thread's first values; ``values`` are the elements of its first row."""

    @abstractmethod
    def added(self, own: Values, values: Values, channel: Expr) -> list[Expr]:
        """Return a thread's values after the elements ``values`` of another row."""

    @abstractmethod
    def of_thread(self, own: Values, count: Expr, channel: Expr) -> list[Expr]:
        """Return the values of a channel in the ``count`` rows of a thread."""

    @abstractmethod
    def merged(self, a: Values, b: Values) -> list[Expr]:
        """Return the values of both parts; those of no row are zero."""

    @abstractmethod
    def finish(self, channel: Expr, values: Values) -> list[tirx.Stmt]:
        """Return the statements that store the results of a channel."""

    def kernels(self) -> list[tirx.Stmt]:
        """Return the kernels: one, or a second one that combines the values of several blocks."""
        threads = self.across * self.height
        first = launch(self.indexer, self.tiles * self.parts, threads, self._block)
        if self.parts == 1:
            return [first]
        blocks = -(-self.channels // WARP)
        second = launch(Indexer(), blocks, WARP * _COMBINING, self._combining)
        return [tirx.AllocBuffer(self.partial), first, second]

    def _block(self, block: Expr, thread: Expr) -> list[tirx.Stmt]:
        simplify = self.indexer.simplify
        part, tile = simplify(block % integer(self.parts)), simplify(block // integer(self.parts))
        place, height = thread % integer(self.across), simplify(thread // integer(self.across))
        groups = self.channels // self.lanes
        group = index_var("group")
        self.indexer.bind(group, groups)
        at = tile * integer(self.across) + place
        if groups % self.across:
            at = tirx.Min(at, integer(groups - 1))
        own, room = allocate_in("local", self.size * self.lanes, _FLOAT, "own")
        shared, more = allocate_in("shared", self.height * self.size * self.width, _FLOAT, "shared")
        begin, end = part * integer(self.stretch) + height, self._end(part)

        def step(i: Expr) -> list[tirx.Stmt]:
            if isinstance(i, tirx.Var):
                self.indexer.bind(i, -(-self.stretch // self.height))
            row = begin + i * integer(self.height)
            return when(row < end, self._at_row(row, group, own, first=False))

        def at_height(h: Expr, s: Expr, column: Expr) -> Expr:
            return (h * integer(self.size) + s) * integer(self.width) + column

        put = []
        count = self._count(part, height)
        for lane in range(self.lanes):
            mine = [load(own, integer(s * self.lanes + lane)) for s in range(self.size)]
            column = place * integer(self.lanes) + integer(lane)
            values = self.of_thread(mine, count, group * integer(self.lanes) + integer(lane))
            put += [
                store(shared, value, at_height(height, integer(s), column))
                for s, value in enumerate(values)
            ]
        column = tile * integer(self.width) + thread
        inside = thread < integer(self.width)
        if self.channels % self.width:
            inside = tirx.And(inside, column < integer(self.channels))
        combined = self._combined(
            self.height,
            lambda h, s: load(shared, at_height(h, s, thread)),
            lambda values: self._put(part, column, values),
        )
        return [
            tirx.Bind(group, at),
            room,
            more,
            *self._at_row(tirx.Min(begin, integer(self.rows - 1)), group, own, first=True),
            loop(-(-self.stretch // self.height), step),
            *put,
            barrier(),
            *when(inside, combined),
        ]

    def _end(self, part: Expr) -> Expr:
        return tirx.Min(integer(self.rows), (part + _ONE) * integer(self.stretch))

    def _count(self, part: Expr, height: Expr) -> Expr:
        """Return the number of rows of a thread."""
        left = self._end(part) - part * integer(self.stretch) - height
        steps = (tirx.Max(left, _ZERO) + integer(self.height - 1)) // integer(self.height)
        return tirx.Cast(_FLOAT, steps)

    def _at_row(self, row: Expr, group: Expr, own: Buffer, *, first: bool) -> list[tirx.Stmt]:
        """Return the statements that add a row to a thread's values, or that begin with it."""
        at = index_var("row")
        self.indexer.bind(at, self.rows)

        def element(position: Expr, lane: Expr) -> list[tirx.Stmt]:
            values = [
                _wide(load(m, _ZERO, at * integer(self.channels) + position), str(m.dtype))
                for m in self.read
            ]
            places = [integer(s * self.lanes) + lane for s in range(self.size)]
            if first:
                new = self.begun(values)
            else:
                new = self.added([load(own, p) for p in places], values, position)
            return [store(own, value, p) for value, p in zip(new, places, strict=True)]

        start = group * integer(self.lanes)
        if self.lanes == 1:
            return [tirx.Bind(at, row), *element(start, _ZERO)]
        return [tirx.Bind(at, row), *side_by_side(self.indexer, self.lanes, start, element)]

    def _combined(
        self,
        count: int,
        value: Callable[[Expr, Expr], Expr],
        end: Callable[[Values], list[tirx.Stmt]],
        first: Expr = _ZERO,
        step: int = 1,
    ) -> list[tirx.Stmt]:
        """Return the statements that merge the values of ``count`` parts, and what ``end`` adds.

        Args:
            value: returns a value of a part, by the numbers of both.
            first, step: the parts are ``first``, ``first + step``, and so on.
        """
        total, room = allocate_in("local", self.size, _FLOAT, "total")
        numbers = [integer(s) for s in range(self.size)]

        def merge(i: Expr) -> list[tirx.Stmt]:
            part = first + i * integer(step)
            new = self.merged([load(total, s) for s in numbers], [value(part, s) for s in numbers])
            # From the last one on: a value of a part depends on those before it.
            stores = [store(total, n, s) for n, s in zip(new, numbers, strict=True)][::-1]
            return when(None if step == 1 else part < integer(count), stores)

        zeros = [store(total, _number(0.0), s) for s in numbers]
        return [
            room,
            *zeros,
            loop(-(-count // step), merge),
            *end([load(total, s) for s in numbers]),
        ]

    def _put(self, part: Expr, channel: Expr, values: Values) -> list[tirx.Stmt]:
        """Return the statements that store a block's values of a channel."""
        if self.parts == 1:
            return self.finish(channel, values)
        return [
            store(self.partial, value, self._place(part, integer(s), channel))
            for s, value in enumerate(values)
        ]

    def _place(self, part: Expr, number: Expr, channel: Expr) -> Expr:
        return (part * integer(self.size) + number) * integer(self.channels) + channel

    def _combining(self, block: Expr, thread: Expr) -> list[tirx.Stmt]:
        height = thread // integer(WARP)
        channel = block * integer(WARP) + thread % integer(WARP)
        near = channel
        if self.channels % WARP:
            near = tirx.Min(channel, integer(self.channels - 1))
        shared, room = allocate_in("shared", _COMBINING * self.size * WARP, _FLOAT, "shared")

        def at(h: Expr, s: Expr) -> Expr:
            return (h * integer(self.size) + s) * integer(WARP) + thread % integer(WARP)

        some = self._combined(
            self.parts,
            lambda part, s: load(self.partial, self._place(part, s, near)),
            lambda values: [store(shared, v, at(height, integer(s))) for s, v in enumerate(values)],
            first=height,
            step=_COMBINING,
        )
        both = self._combined(
            _COMBINING,
            lambda h, s: load(shared, at(h, s)),
            lambda values: self.finish(channel, values),
        )
        inside = tirx.And(height.equal(_ZERO), channel < integer(self.channels))
        return [room, *some, barrier(), *when(inside, both)]


class _Statistics(_Sums):
    """Sums for mean and variance: a count, a mean, and a sum of squared differences from it.

    A thread adds up differences from its first element, and their squares. The parts are combined
    as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979). Means are measured from the channel's first element, so that no digits are
    lost where they are large.
    """

    size = 3

    def __init__(
        self,
        x: Buffer,
        old: Sequence[Buffer],
        results: Sequence[Buffer],
        eps: float,
        momentum: float,
    ) -> None:
        super().__init__([x])
        self.old, self.results, self.eps, self.momentum = old, results, eps, momentum

    def begun(self, values: Values) -> list[Expr]:
        return [values[0], _number(0.0), _number(0.0)]

    def added(self, own: Values, values: Values, channel: Expr) -> list[Expr]:
        difference = values[0] - own[0]
        return [own[0], own[1] + difference, own[2] + difference * difference]

    def of_thread(self, own: Values, count: Expr, channel: Expr) -> list[Expr]:
        first, total, squares = own
        step = total / tirx.Max(count, _number(1.0))
        return [count, first - self._base(channel) + step, squares - total * step]

    def merged(self, a: Values, b: Values) -> list[Expr]:
        count = a[0] + b[0]
        share = b[0] / tirx.Max(count, _number(1.0))
        difference = b[1] - a[1]
        between = a[0] * difference * share * difference
        return [count, a[1] + difference * share, a[2] + b[2] + between]

    def finish(self, channel: Expr, values: Values) -> list[tirx.Stmt]:
        mean, squares = self._base(channel) + values[1], values[2]
        variance = squares / _number(self.rows)
        found = [mean, _number(1.0) / tirx.sqrt(variance + _number(self.eps))]
        for before, now in zip(self.old, (mean, squares / _number(self.rows - 1)), strict=False):
            kept = load(before, channel) * _number(1.0 - self.momentum)
            found.append(kept + now * _number(self.momentum))
        return [store(r, value, channel) for r, value in zip(self.results, found, strict=True)]

    def _base(self, channel: Expr) -> Expr:
        """Return the channel's first element, from which means are measured."""
        (x,) = self.read
        return _wide(load(x, _ZERO, channel), str(x.dtype))


class _Gradients(_Sums):
    """Sums of the cotangent, and of its products with the differences of x from the mean."""

    size = 2

    def __init__(
        self, read: Sequence[Buffer], mean: Buffer, inverse: Buffer, results: Sequence[Buffer]
    ) -> None:
        super().__init__(read)
        self.mean, self.inverse, self.results = mean, inverse, results

    def begun(self, values: Values) -> list[Expr]:
        return [_number(0.0), _number(0.0)]

    def added(self, own: Values, values: Values, channel: Expr) -> list[Expr]:
        grad, x = values
        return [own[0] + grad, own[1] + grad * (x - load(self.mean, channel))]

    def of_thread(self, own: Values, count: Expr, channel: Expr) -> list[Expr]:
        return list(own)

    def merged(self, a: Values, b: Values) -> list[Expr]:
        return [one + other for one, other in zip(a, b, strict=True)]

    def finish(self, channel: Expr, values: Values) -> list[tirx.Stmt]:
        found = [values[0], values[1] * load(self.inverse, channel)]
        return [store(r, value, channel) for r, value in zip(self.results, found, strict=True)]


def _matrix(rows: int, channels: int, dtype: str, name: str) -> Buffer:
    return tirx.decl_buffer([integer(rows), integer(channels)], dtype, name)


def _vector(size: int, name: str) -> Buffer:
    return tirx.decl_buffer([integer(size)], _FLOAT, name)


def _number(value: float) -> Expr:
    return tirx.const(float(value), _FLOAT)


def _wide(value: Expr, dtype: str) -> Expr:
    value = from_memory(value, dtype)
    return tirx.Cast(_FLOAT, value) if dtype == "float16" else value


__all__ = ["channel_gradients", "channel_statistics"]

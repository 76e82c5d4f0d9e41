"""Loops for stable sort and for topk; NaN counts as the largest element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.nests import (
    Buffer,
    around,
    emit_nest,
    index,
    local,
    loops,
    store,
    when,
)
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.functions import HALF, is_nan

Before = Callable[[Expr, Expr], Expr]
# The buffers of values and of their indices, and the place where the elements begin there.
Pair: TypeAlias = tuple[Sequence[Buffer], Expr]

_ZERO = index(0)
# Each merge doubles the width of sorted runs, and no tensor has more elements.
_MOST_MERGES = 48


def _before(descending: bool) -> Before:
    """Return a comparison: whether one element must come before another."""

    def compare(a: Expr, b: Expr) -> Expr:
        if str(a.ty.dtype) in HALF:
            a, b = tirx.Cast("float32", a), tirx.Cast("float32", b)
        if descending:
            return tirx.Or(a > b, tirx.And(is_nan(a), tirx.Not(is_nan(b))))
        return tirx.Or(a < b, tirx.And(is_nan(b), tirx.Not(is_nan(a))))

    return compare


def _merge(
    source: Sequence[Buffer],
    target: Sequence[Buffer],
    count: int,
    widths: tuple[Expr, Expr],
    before: Before,
    starts: tuple[Expr, Expr] = (_ZERO, _ZERO),
) -> None:
    """Emit loops that merge adjacent sorted runs in pairs.

    Args:
        widths: the number of elements of a run, and of a pair.
        starts: where the elements begin in the buffers of ``source`` and ``target``.
    """
    (width, both), (read, written) = widths, starts
    with loops(index(count - 1) // both + index(1)) as (k,):
        begin = k * both
        middle = tirx.Min(begin + width, index(count))
        end = tirx.Min(begin + both, index(count))
        heads = local(2, "int64")
        store(heads, begin, index(0))
        store(heads, middle, index(1))
        with loops(both) as (t,), when(begin + t < end):
            left, right = heads[index(0)], heads[index(1)]
            # The indices are limited, so that nothing after the last element is read.
            ahead = before(
                source[0][read + tirx.Min(right, index(count - 1))],
                source[0][read + tirx.Min(left, index(count - 1))],
            )
            chosen = tirx.Or(left >= middle, tirx.And(right < end, ahead))
            which = local(1, "int64")
            store(which, tirx.Cast("int64", chosen))
            place = heads[which[0]]
            for a, b in zip(source, target, strict=True):
                store(b, a[read + place], written + begin + t)
            store(heads, place + index(1), which[0])


def _sorted(
    count: int, dtype: str, fill: Callable[[Sequence[Buffer]], None], before: Before
) -> Pair:
    """Emit the merges that sort ``count`` elements; ``fill`` writes values and indices.

    Return the buffers of the sorted values and of their indices, and where these begin there.
    """
    pairs = [[local(count, dtype), local(count, "int64")] for _ in range(2)]
    fill(pairs[0])
    width = 1
    while width < count:
        _merge(pairs[0], pairs[1], count, (index(width), index(2 * width)), before)
        pairs.reverse()
        width *= 2
    return pairs[0], _ZERO


def _sorted_at_any_size(
    count: int, dtype: str, fill: Callable[[Sequence[Buffer]], None], before: Before
) -> Pair:
    """Like :func:`_sorted`, for any ``count``: the number of merges follows at run time.

    The two halves of one pair of buffers are source and target in turn.
    """
    pair = [local(2 * count, dtype), local(2 * count, "int64")]
    fill(pair)
    # TVM divides by a value that it reads; twice another value it would cancel at some sizes.
    state = local(3, "int64")
    width, both, start = (state[index(n)] for n in range(3))
    for place, value in enumerate((1, 2, 0)):
        store(state, index(value), index(place))
    with loops(_MOST_MERGES), when(width < index(count)):
        _merge(pair, pair, count, (width, both), before, (start, index(count) - start))
        store(state, both, _ZERO)
        store(state, both + both, index(1))
        store(state, index(count) - start, index(2))
    return pair, start


def _sort(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    x, shape = arguments["self"], shape_of(arguments["self"])
    dtype, axis = str(x.ty.dtype.dtype), arguments["dim"] % len(shape)
    rows, count, columns = around(shape, axis)
    before = _before(bool(arguments["descending"]))
    merged = _sorted_at_any_size if sizes_vary() else _sorted

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        work = rows * columns * count * count.bit_length() * 4
        with loops(rows * columns, parallel_work=work) as (position,):
            row, column = position // columns, position % columns

            def fill(pair: Sequence[Buffer]) -> None:
                with loops(count) as (i,):
                    store(pair[0], inputs[0][row, i, column], i)
                    store(pair[1], i, i)

            buffers, start = merged(count, dtype, fill, before)
            with loops(count) as (i,):
                for buffer, result in zip(buffers, outputs, strict=True):
                    store(result, buffer[start + i], row, i, column)

    return _emit(bb, arguments, axis, "sort", count, write)


def _topk(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit loops that insert each element into a sorted list of the ``k`` best ones so far."""
    x, shape = arguments["self"], shape_of(arguments["self"])
    dtype, axis, most = str(x.ty.dtype.dtype), arguments["dim"] % len(shape), int(arguments["k"])
    rows, count, columns = around(shape, axis)
    before = _before(bool(arguments["largest"]))

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        work = rows * columns * count * most
        with loops(rows * columns, parallel_work=work) as (position,):
            row, column = position // columns, position % columns
            best = [local(most, dtype), local(most, "int64")]
            with loops(count) as (i,):
                value = inputs[0][row, i, column]
                last = tirx.Min(i, index(most - 1))
                with when(tirx.Or(i < index(most), before(value, best[0][last]))):
                    store(best[0], value, last)
                    store(best[1], i, last)
                    _sink(best, last, before)
            with loops(most) as (i,):
                for buffer, result in zip(best, outputs, strict=True):
                    store(result, buffer[i], row, i, column)

    return _emit(bb, arguments, axis, "topk", most, write)


def _sink(best: Sequence[Buffer], last: Expr, before: Before) -> None:
    """Emit a loop that moves the element at ``last`` forward to its place in the sorted list."""
    most = int(best[0].shape[0])
    with loops(most - 1) as (step,):
        place = last - step
        front = tirx.Max(place - index(1), index(0))
        with when(
            tirx.And(place > index(0), before(best[0][tirx.Max(place, index(0))], best[0][front]))
        ):
            for buffer in best:
                kept = local(1, str(buffer.dtype))
                store(kept, buffer[front])
                store(buffer, buffer[place], front)
                store(buffer, kept[0], place)


def _emit(
    bb: relax.BlockBuilder,
    arguments: Arguments,
    axis: int,
    name: str,
    count: int,
    write: Callable[[Sequence[Buffer], Sequence[Buffer]], None],
) -> Expr:
    """Emit the loop nest ``write`` of values and indices, and return the results of the call.

    Args:
        write: writes the statements, for operand and results of three dimensions.
    """
    x = arguments["self"]
    shape = shape_of(x)
    rows, extent, columns = around(shape, axis)
    result = (rows, count, columns)
    flat = bb.emit(relax.op.reshape(x, (rows, extent, columns)))
    types = [(result, str(x.ty.dtype.dtype)), (result, "int64")]
    pair = emit_nest(bb, name, [flat], types, write)
    final = [*shape[:axis], count, *shape[axis + 1 :]]
    read = arguments.results or (0, 1)
    fields = [bb.emit(relax.TupleGetItem(pair, n)) for n in read]
    return relax.Tuple([bb.emit(relax.op.reshape(field, final)) for field in fields])


SORTS: dict[str, Compile] = {
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.topk.default": _topk,
}

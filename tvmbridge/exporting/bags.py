"""Loops for embedding bags: sums, means and maxima of rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.aten.nests import (
    Buffer,
    dtype_of,
    emit_nest,
    index,
    local,
    loops,
    store,
    when,
)
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.lets import constant
from tvmbridge.legalize.reductions import accumulator_dtype

_SUM, _MEAN, _MAX = 0, 1, 2


def embedding_bag(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return the bags; None if the call also reads a result that is for gradients.

    An index beyond the table gives NaN, where PyTorch raises an error.
    """
    table, indices, offsets = (arguments[name] for name in ("weight", "indices", "offsets"))
    if arguments.results != (0,):
        return None
    (rows, width), (count,) = shape_of(table), shape_of(indices)
    mode, padding = int(arguments["mode"]), int(arguments["padding_idx"])
    starts, dtype = shape_of(offsets)[0], dtype_of(table)
    bags = starts - 1 if arguments["include_last_offset"] else starts
    wide = accumulator_dtype(dtype)
    factors = arguments["per_sample_weights"]

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        source, places, begins, *rest = inputs
        with loops(bags, parallel_work=count * width) as (bag,):
            total, used = local(width, wide), local(1, "int64")
            with loops(width) as (d,):
                store(total, constant(0, wide), d)
            store(used, index(0), index(0))
            begin = _within(begins[bag], count)
            last = index(starts - 1)
            after = _within(begins[tirx.min(bag + index(1), last)], count)
            end = tirx.Select(bag < last, after, index(count))
            with loops(tirx.max(end - begin, index(0))) as (i,):
                at = begin + i
                place = tirx.Cast("int64", places[at])
                inside = tirx.And(place >= index(0), place < index(rows))
                # Without padding the number is -1.
                with when(tirx.Or(tirx.NE(place, index(padding)), place < index(0))):
                    factor = tirx.Cast(wide, rest[0][at]) if rest else None
                    with loops(width) as (d,):
                        value = tirx.Cast(wide, _element(source, place, inside, d))
                        value = value if factor is None else value * factor
                        begins_bag = tirx.EQ(used[index(0)], index(0))
                        # Outside of the table the value is NaN, and so is the maximum.
                        replaces = tirx.Or(begins_bag, tirx.Not(inside))
                        store(total, _joined(mode, total[d], value, replaces), d)
                    store(used, used[index(0)] + index(1), index(0))
            with loops(width) as (d,):
                found = total[d]
                if mode == _MEAN:
                    found = found / tirx.Cast(wide, tirx.max(used[index(0)], index(1)))
                store(outputs[0], tirx.Cast(dtype, found), bag, d)

    tensors = [table, indices, offsets, *([] if factors is None else [factors])]
    found: Any = emit_nest(bb, "embedding_bag", tensors, [((bags, width), dtype)], write)
    return relax.Tuple([found])


def _within(place: Expr, count: int) -> Expr:
    return tirx.max(tirx.min(tirx.Cast("int64", place), index(count)), index(0))


def _element(table: Buffer, place: Expr, inside: Expr, column: Expr) -> Expr:
    safe = tirx.Select(inside, place, index(0))
    nan = tirx.Cast(str(table.dtype), constant(float("nan"), "float32"))
    return tirx.Select(inside, table[safe, column], nan)


def _joined(mode: int, total: Expr, value: Expr, replaces: Expr) -> Expr:
    if mode == _MAX:
        return tirx.Select(tirx.Or(replaces, value > total), value, total)
    return total + value

"""Loops for searches in sorted rows: ``bucketize`` and ``searchsorted``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.aten.nests import Buffer, dtype_of, emit_nest, index, local, loops, store
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.passes.base import shape_of as known_shape

_HALVES = ("float16", "bfloat16")


def searched(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return, for each value, the place in its sorted row before which it belongs."""
    is_bucketize = "bucketize" in arguments.op
    edges = arguments["boundaries" if is_bucketize else "sorted_sequence"]
    values, result = arguments["self"], dtype_of(call)
    side = arguments.values.get("side")
    if any(known_shape(t) is None for t in (edges, values)) or dtype_of(edges) != dtype_of(values):
        return None
    if arguments.values.get("sorter") is not None or dtype_of(edges) in ("bool", *_HALVES):
        return None
    right = side == "right" if side is not None else bool(arguments["right"])
    *front, length = shape_of(edges)
    shape = shape_of(values)
    if not length:
        return relax.op.zeros(shape, result)
    rows = prod(front)
    count = prod(shape) // max(rows, 1)

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        (row_edges, wanted), (target,) = inputs, outputs
        with loops(rows, parallel_work=rows * count * length.bit_length()) as (row,):
            ends = local(2, "int64")
            with loops(count) as (column,):
                store(ends, index(0), index(0))
                store(ends, index(length), index(1))
                with loops(length.bit_length()):
                    _halve(ends, row_edges, row, wanted[row, column], right, length)
                store(target, tirx.Cast(result, ends[index(0)]), row, column)

    flat = [
        bb.emit(relax.op.reshape(edges, (rows, length))),
        bb.emit(relax.op.reshape(values, (rows, count))),
    ]
    found = emit_nest(bb, "search", flat, [((rows, count), result)], write)
    return relax.op.reshape(found, shape)


def _halve(ends: Buffer, edges: Buffer, row: Expr, value: Expr, right: bool, length: int) -> None:
    """Halve the places between ``ends``; a comparison with NaN is false, as in the kernel."""
    first, last = ends[index(0)], ends[index(1)]
    middle = tirx.min(tirx.floordiv(first + last, index(2)), index(length - 1))
    edge = edges[row, middle]
    is_before = edge > value if right else edge >= value
    is_open = first < last
    new = local(1, "int64")
    store(new, tirx.Select(is_before, first, middle + index(1)), index(0))
    store(ends, tirx.Select(is_open, tirx.Select(is_before, middle, last), last), index(1))
    store(ends, tirx.Select(is_open, new[index(0)], first), index(0))

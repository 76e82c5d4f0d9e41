"""Loops for pooling of images with channels last, each element a chain over its window.

Neighbouring channels are neighbours in memory, so threads of a GPU read and write them as vectors.
A position beyond an edge of the image is moved to the edge, so that every read is in bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.aten.largest import Taps
from tvmbridge.legalize.aten.windows import MAX_POOL, each
from tvmbridge.legalize.broadcast import OPAQUE, shape_of
from tvmbridge.legalize.elementwise import larger
from tvmbridge.legalize.lets import Lets, constant
from tvmbridge.legalize.reductions import accumulator_dtype

AVG_POOL = "aten.avg_pool2d.default"
# An element of larger windows would be a long chain.
_MOST_TAPS = 25


def pools_by_chains(content: dict[str, Any]) -> bool:
    """Whether loops here compute a pooling of two dimensions; ``content`` is its spec's content."""
    if content["op"] not in (AVG_POOL, MAX_POOL) or content["results"] not in (None, [0]):
        return False
    arguments = Arguments.of(content, [None])
    spread = each(arguments.values.get("dilation", 1), 2)
    # For variable sizes, windows may reach over the edge at some of the sizes.
    return (
        prod(each(arguments["kernel_size"], 2)) <= _MOST_TAPS
        and spread == [1, 1]
        and (not sizes_vary())
    )


def pool_with_channels_last(
    bb: relax.BlockBuilder, call: Call, arguments: Arguments, x: Expr
) -> Expr:
    """Emit the pooling of ``x``: (batch, height, width, channels)."""
    is_maximum = arguments.op == MAX_POOL
    type_ = call.ty.fields[0] if is_maximum else call.ty
    shape, dtype = list(map(int, type_.shape.values)), str(type_.dtype.dtype)
    taps = _taps(arguments, shape_of(x), shape)

    def compute(image: te.Tensor) -> te.Tensor:
        element = _largest if is_maximum else _mean

        def at(*i: Expr) -> Expr:
            return element(image, taps, i, arguments, dtype)

        return te.compute(shape, at, name="T_pool")

    # Fused with its source, the pool would compute an element once for each window that has it.
    attrs = {"op_pattern": OPAQUE}
    name = "max_pool" if is_maximum else "avg_pool"
    pooled = bb.call_te(compute, x, primfunc_name_hint=name, primfunc_attrs=attrs)
    return relax.Tuple([bb.emit(pooled)]) if is_maximum else pooled


def _taps(arguments: Arguments, image: Sequence[int], result: Sequence[int]) -> list[Taps]:
    size = each(arguments["kernel_size"], 2)
    steps, edges = each(arguments["stride"] or size, 2), each(arguments["padding"], 2)
    return [Taps(*given) for given in zip(size, steps, edges, image[1:3], result[1:3], strict=True)]


def _largest(
    image: te.Tensor, taps: Sequence[Taps], i: Sequence[Expr], arguments: Arguments, dtype: str
) -> Expr:
    acc, lets, best = accumulator_dtype(dtype), Lets(), None
    for row, column in product(*(t.of(at) for t, at in zip(taps, i[1:3], strict=True))):
        value = lets.bind(tirx.Cast(acc, image(i[0], row, column, i[3])), "value")
        best = value if best is None else lets.bind(larger(best, value), "best")
    assert best is not None
    return lets.close(tirx.Cast(dtype, best))


def _mean(
    image: te.Tensor, taps: Sequence[Taps], i: Sequence[Expr], arguments: Arguments, dtype: str
) -> Expr:
    acc, lets, zero = accumulator_dtype(dtype), Lets(), constant(0.0, accumulator_dtype(dtype))
    rows, columns = (
        list(zip(t.of(at), range(t.size), strict=True)) for t, at in zip(taps, i[1:3], strict=True)
    )
    # The simplifier would drop a plain zero, and a mean of -0.0 would not be 0.0 as in PyTorch.
    total: Expr = opaque(zero)
    for (row, of_row), (column, of_column) in product(rows, columns):
        # Bound outside of the choice, so that the read is part of a vector.
        value = lets.bind(tirx.Cast(acc, image(i[0], row, column, i[3])), "value")
        inside = [
            condition
            for t, at, tap in zip(taps, i[1:3], (of_row, of_column), strict=True)
            for condition in _inside(t, at, tap)
        ]
        term: Expr = value
        for condition in inside:
            term = tirx.Select(condition, term, zero)
        total = lets.bind(total + term, "total")
    count = arguments["divisor_override"]
    if count is None:
        within = arguments["count_include_pad"]
        rows_in, columns_in = (
            _extent(t, at, bool(within)) for t, at in zip(taps, i[1:3], strict=True)
        )
        count = rows_in * columns_in
    number = constant(float(count), acc) if isinstance(count, int) else tirx.Cast(acc, count)
    return lets.close(tirx.Cast(dtype, opaque(total / number)))


def _inside(taps: Taps, index: Expr, tap: int) -> list[Expr]:
    """Return the conditions that position ``tap`` of a window is in the image."""
    first, last = tap - taps.edge, (taps.count - 1) * taps.step + tap - taps.edge
    position = index * taps.step + first
    found = [] if first >= 0 else [position >= constant(0, "int64")]
    return found if last < taps.extent else [*found, position < constant(taps.extent, "int64")]


def _extent(taps: Taps, index: Expr, with_padding: bool) -> Any:
    """Return the number of positions of a window that its mean counts, along one dimension.

    ``with_padding``: whether the padding counts; positions beyond it never count.
    """
    edge = taps.edge if with_padding else 0
    first, last = -taps.edge, (taps.count - 1) * taps.step - taps.edge + taps.size
    if first >= -edge and last <= taps.extent + edge:
        return taps.size
    begin = index * taps.step + constant(first, "int64")
    end = tirx.min(begin + constant(taps.size, "int64"), constant(taps.extent + edge, "int64"))
    return end - tirx.max(begin, constant(-edge, "int64"))


__all__ = ["pool_with_channels_last", "pools_by_chains"]

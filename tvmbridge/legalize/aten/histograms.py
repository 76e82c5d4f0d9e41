"""Loops for histc, histograms with bins of equal width."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import relax, tirx
from tvm.ir import Call, Expr
from tvm.tirx.script import builder as tir

from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments, Compile
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
from tvmbridge.legalize.elementwise import larger, smaller
from tvmbridge.legalize.functions import is_nan
from tvmbridge.legalize.lets import constant


def _histc(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit the counts of the bins; if ``min`` equals ``max``, the range is that of the elements."""
    x, dtype, bins = arguments["self"], dtype_of(call), int(arguments["bins"])
    ends = [float(arguments[name]) for name in ("min", "max")]
    size = prod(shape_of(x))

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        (source,), (counts,) = inputs, outputs
        first, last = local(1, dtype), local(1, dtype)
        _find_range(source, size, ends, first, last)
        with loops(bins) as (k,):
            store(counts, constant(0, dtype), k)
        with loops(size) as (i,):
            value = source[i]
            with when(tirx.And(value >= first[0], value <= last[0])):
                scaled = opaque(opaque(value - first[0]) * constant(float(bins), dtype))
                place = tirx.Cast("int64", scaled / opaque(last[0] - first[0]))
                at = tirx.Min(place, index(bins - 1))
                store(counts, counts[at] + constant(1, dtype), at)

    flat = bb.emit(relax.op.reshape(x, (size,)))
    return emit_nest(bb, "histc", [flat], [([bins], dtype)], write)


def _find_range(
    source: Buffer, size: int, ends: Sequence[float], first: Buffer, last: Buffer
) -> None:
    dtype = str(source.dtype)
    store(first, constant(ends[0], dtype))
    store(last, constant(ends[1], dtype))
    if ends[0] != ends[1]:
        return
    store(first, source[0])
    store(last, source[0])
    with loops(size) as (i,):
        store(first, smaller(first[0], source[i]))
        store(last, larger(last[0], source[i]))
    with when(first[0].equal(last[0])):
        store(first, first[0] - constant(1, dtype))
        store(last, last[0] + constant(1, dtype))
    bound = tirx.max_value(dtype)
    finite = tirx.And(tirx.abs(first[0]) <= bound, tirx.abs(last[0]) <= bound)
    known = tirx.Not(tirx.Or(is_nan(first[0]), is_nan(last[0])))
    with tir.Assert(tirx.And(known, finite), "torch.histc: the range is not finite"):
        pass


HISTOGRAMS: dict[str, Compile] = {"aten.histc.default": _histc}

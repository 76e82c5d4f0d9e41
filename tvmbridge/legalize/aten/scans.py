"""Loops for cumsum and cumprod."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.nests import Buffer, around, dtype_of, emit_nest, local, loops, store
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.lets import constant

# The dtypes that PyTorch sums in on a CPU.
_SUMMED_IN = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}
_COLUMNS = 64


def _cumsum(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    return _scan(bb, call, arguments, "cumsum")


def cumulative_product(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit loops that multiply the elements along a dimension."""
    return _scan(bb, call, arguments, "cumprod")


def _scan(bb: relax.BlockBuilder, call: Call, arguments: Arguments, name: str) -> Expr:
    multiplies = name == "cumprod"
    x, result, shape = arguments["self"], dtype_of(call), shape_of(call)
    if not shape:
        return relax.op.astype(x, result)
    rows, count, columns = around(shape, arguments["dim"] % len(shape))
    widest = 1 if sizes_vary() else min(columns, _COLUMNS)
    width = next(w for w in range(widest, 0, -1) if columns % w == 0)
    wide = _SUMMED_IN.get(result, result)
    blocks = (rows, columns // width)

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        (source,), (target,) = inputs, outputs
        with loops(blocks[0] * blocks[1], parallel_work=rows * count * columns) as (block,):
            row, first = block // blocks[1], block % blocks[1] * width
            sums = local(width, wide)
            with loops(width) as (k,):
                store(sums, constant(int(multiplies), wide), k)
            with loops(count, width) as (i, k):
                # PyTorch casts to the result's dtype first, which may be narrower than the input's.
                value = tirx.Cast(wide, tirx.Cast(result, source[row, i, first + k]))
                store(sums, sums[k] * value if multiplies else sums[k] + value, k)
                store(target, tirx.Cast(result, sums[k]), row, i, first + k)

    flat = bb.emit(relax.op.reshape(x, (rows, count, columns)))
    summed = emit_nest(bb, name, [flat], [((rows, count, columns), result)], write)
    return relax.op.reshape(summed, shape)


SCANS: dict[str, Compile] = {"aten.cumsum.default": _cumsum}

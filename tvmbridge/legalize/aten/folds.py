"""Loops for col2im, which adds up overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.nests import Buffer, dtype_of, emit_nest, index, loops, store, when
from tvmbridge.legalize.aten.scatters import added
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.lets import constant


def _positions(arguments: Arguments, axis: int) -> int:
    """Return the number of windows along an axis."""
    size, step = (int(arguments[name][axis]) for name in ("output_size", "stride"))
    kernel, spread, edge = (
        int(arguments[name][axis]) for name in ("kernel_size", "dilation", "padding")
    )
    return (size + 2 * edge - spread * (kernel - 1) - 1) // step + 1


def _col2im(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit loops that add the elements of each window to the image, except in the padding."""
    shape, dtype = shape_of(call), dtype_of(call)
    height, width = shape[-2:]
    images, kernel = prod(shape[:-2]), [int(n) for n in arguments["kernel_size"]]
    windows = [_positions(arguments, axis) for axis in (0, 1)]
    steps, spreads, edges = (arguments[n] for n in ("stride", "dilation", "padding"))
    work = images * prod(kernel) * prod(windows)

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        (source,), (target,) = inputs, outputs
        with loops(images, parallel_work=work) as (n,):
            with loops(height, width) as (h, w):
                store(target, constant(0, dtype), n, h, w)
            with loops(*kernel, *windows) as (a, b, i, j):
                row = i * index(steps[0]) + a * index(spreads[0]) - index(edges[0])
                column = j * index(steps[1]) + b * index(spreads[1]) - index(edges[1])
                inside = tirx.And(row >= 0, row < index(height))
                with when(tirx.And(inside, tirx.And(column >= 0, column < index(width)))):
                    value = added(target[n, row, column], source[n, a, b, i, j])
                    store(target, value, n, row, column)

    split = bb.emit(relax.op.reshape(arguments["self"], (images, *kernel, *windows)))
    whole = emit_nest(bb, "col2im", [split], [((images, height, width), dtype)], write)
    return relax.op.reshape(whole, shape)


FOLDS: dict[str, Compile] = {"aten.col2im.default": _col2im}

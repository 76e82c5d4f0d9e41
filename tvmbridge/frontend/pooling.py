"""Converters of pooling and of interpolation.

A mean over windows that tile the input becomes a reshape and a mean. Other windows become loops of
:mod:`tvmbridge.legalize.aten.windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, MOVED, Declined, converts
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.legalize.aten.windows import each

aten = torch.ops.aten


def _tiled(shape: Sequence[int], windows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the shape with each of the last dimensions split into (number of windows, window).

    Also return the axes of the windows in that shape.
    """
    front = len(shape) - len(windows)
    inner = [n for d, w in zip(shape[front:], windows, strict=True) for n in (d // w, w)]
    return [*shape[:front], *inner], [front + 2 * i + 1 for i in range(len(windows))]


def _mean_of_tiles(ctx: Importer, node: fx.Node, x: fx.Node, windows: Sequence[int]) -> relax.Expr:
    shape, axes = _tiled(shape_of(x), windows)
    tiles = ctx.emit(relax.op.reshape(ctx.value(x), shape))
    return relax.op.mean(tiles, axes)


def _even_windows(inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    # For variable sizes, one extent may divide another only at the sizes of this sample.
    if any(i % o or (o > 1 and sizes_vary()) for i, o in zip(inputs, outputs, strict=True)):
        raise Declined("windows of different sizes")
    return [i // o for i, o in zip(inputs, outputs, strict=True)]


@converts(
    aten.adaptive_avg_pool1d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    dtypes=FLOATS,
    widens=False,
)
def _adaptive_mean(ctx: Importer, node: fx.Node, x: fx.Node, size: Sequence[int]) -> relax.Expr:
    count = len(size)
    windows = _even_windows(shape_of(x)[-count:], shape_of(node)[-count:])
    return _mean_of_tiles(ctx, node, x, windows)


_DIMENSIONS = {
    aten.avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
}


@converts(*_DIMENSIONS, dtypes=FLOATS, widens=False)
def _mean_of_windows(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    count = _DIMENSIONS[node.target]  # type: ignore[index]
    windows = each(kernel, count)
    steps = each(stride or windows, count)
    edges = each(padding, count)
    if ceil_mode or divisor_override or (any(edges) and not count_include_pad):
        raise Declined("windows that are not all divided by their size")
    inputs = shape_of(x)[-count:]
    tiles = not sizes_vary() and all(n % w == 0 for n, w in zip(inputs, windows, strict=True))
    if steps == windows and not any(edges) and tiles:
        return _mean_of_tiles(ctx, node, x, windows)
    return ctx.compiled_call(node)


@converts(aten.max_pool2d_with_indices.default, dtypes=FLOATS | {torch.int64}, widens=False)
def _largest_of_windows(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    if any(user.args[1:] != (0,) for user in node.users) or not node.users:
        raise Declined("the indices are read")
    if ceil_mode or result_dtype(x) not in FLOATS:
        raise Declined("windows that reach over the edge")
    return ctx.compiled_call(node)


@converts(
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    dtypes=FLOATS,
    widens=False,
)
def _mean_of_tiles_backward(
    ctx: Importer, node: fx.Node, grad: fx.Node, x: fx.Node, *rest: Any
) -> relax.Expr:
    inputs, outputs = shape_of(x)[-2:], shape_of(grad)[-2:]
    windows = _even_windows(inputs, outputs)
    if rest:
        kernel, stride, padding, ceil_mode, _, divisor = rest
        steps = each(stride or kernel, 2)
        plain = not any(each(padding, 2)) and not ceil_mode and not divisor
        if not plain or each(kernel, 2) != windows or steps != windows:
            raise Declined("windows that do not tile the input")
    number = ctx.tensor(float(prod(windows)), result_dtype(node))
    share = ctx.emit(relax.op.divide(ctx.value(grad), number))
    shape, axes = _tiled(shape_of(x), windows)
    single = [1 if axis in axes else n for axis, n in enumerate(shape)]
    wide = ctx.emit(relax.op.broadcast_to(ctx.emit(relax.op.reshape(share, single)), shape))
    return relax.op.reshape(wide, shape_of(node))


@converts(aten.upsample_nearest2d.vec, dtypes=MOVED)
def _repeated(
    ctx: Importer, node: fx.Node, x: fx.Node, size: Any, factors: Sequence[float] | None = None
) -> Any:
    """Repeat each element as a tile if both factors are integers, and otherwise emit loops."""
    shape, result = shape_of(x), shape_of(node)
    tiles = [r // n for r, n in zip(result[-2:], shape[-2:], strict=True)]
    whole = [t * n for t, n in zip(tiles, shape[-2:], strict=True)] == list(result[-2:])
    if not whole or (factors is not None and list(factors) != tiles):
        if result_dtype(x) not in FLOATS:
            raise Declined("factors that are not whole, in another dtype than the loops have")
        return ctx.compiled_call(node)
    single = [*shape[:-2], shape[-2], 1, shape[-1], 1]
    wide = [*shape[:-2], shape[-2], tiles[0], shape[-1], tiles[1]]
    values = ctx.emit(relax.op.reshape(ctx.value(x), single))
    return relax.op.reshape(ctx.emit(relax.op.broadcast_to(values, wide)), result)


@converts(aten.upsample_bilinear2d.vec, dtypes=FLOATS, widens=False)
def _interpolated(ctx: Importer, node: fx.Node, *_: Any) -> Any:
    return ctx.compiled_call(node)

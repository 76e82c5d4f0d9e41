"""Converters of pools."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx
from torch.nn import functional

from tvmbridge.relay.registry import FLOATS, Refused, converts
from tvmbridge.relay.windows import reach, spread
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

aten = torch.ops.aten

_LAYOUT = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def _batched(ctx: Writer, x: fx.Node, rank: int) -> str:
    """Return an operand with a batch dimension."""
    shape, text = shape_of(x), ctx.value(x)
    return ctx.reshape(text, [1, *shape]) if len(shape) == rank + 1 else text


def _as_result(ctx: Writer, text: str, x: fx.Node, shape: Sequence[int], rank: int) -> str:
    return ctx.reshape(text, shape) if len(shape_of(x)) == rank + 1 else text


@converts(
    aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, dtypes=FLOATS
)
def _max_pool(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[str, None]:
    rank = 2 if "2d" in str(node.target) else 3
    result = [int(n) for n in node.meta["val"][0].shape]
    sizes, pads = spread(kernel, rank), spread(padding, rank)
    steps, gaps = spread(stride, rank) if stride else sizes, spread(dilation, rank)
    window = zip(shape_of(x)[-rank:], pads, zip(sizes, steps, gaps, strict=True), strict=True)
    behind = [reach(*w, count) for w, count in zip(window, result[-rank:], strict=True)]
    text = ctx.call(
        f"nn.max_pool{rank}d",
        _batched(ctx, x, rank),
        pool_size=sizes,
        strides=steps,
        dilation=gaps,
        padding=[*pads, *(behind if ceil_mode else pads)],
        layout=_LAYOUT[rank],
    )
    return _as_result(ctx, text, x, result, rank), None


@converts(
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, dtypes=FLOATS
)
def _avg_pool(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> str:
    rank = int(str(node.target).split("avg_pool")[1][0])
    result, dtype = shape_of(node), dtype_of(node)
    sizes, pads = spread(kernel, rank), spread(padding, rank)
    steps = spread(stride, rank) if stride else sizes
    window = zip(shape_of(x)[-rank:], pads, zip(sizes, steps, [1] * rank, strict=True), strict=True)
    behind = [reach(*w, count) for w, count in zip(window, result[-rank:], strict=True)]
    text = ctx.call(
        f"nn.avg_pool{rank}d",
        _batched(ctx, x, rank),
        pool_size=sizes,
        strides=steps,
        padding=[*pads, *(behind if ceil_mode else pads)],
        layout=_LAYOUT[rank],
        count_include_pad=True,
    )
    text = _as_result(ctx, text, x, result, rank)
    factors = _factors(node, x, rank)
    if bool((factors == 1).all()):
        return text
    return ctx.call("multiply", text, ctx.constant(factors.to(dtype)))


def _factors(node: fx.Node, x: fx.Node, rank: int) -> torch.Tensor:
    """Return what a sum over whole windows, padding included, is multiplied by, times their size.

    PyTorch divides a window by other numbers if it has padding or reaches beyond it.
    """
    pool = getattr(functional, f"avg_pool{rank}d")
    ones = torch.ones(1, 1, *shape_of(x)[-rank:], dtype=torch.float64)
    kernel, *rest = node.args[1:]
    sizes = spread(kernel, rank)  # type: ignore[arg-type]
    # The sum of a window of ones is the number of its elements that are no padding.
    inside = _window_sums(ones, node, rank)
    means = pool(ones, kernel, *rest, **node.kwargs)
    divisors = torch.where(means > 0, inside / means, math.prod(sizes))
    return (math.prod(sizes) / divisors.round())[0, 0]


def _window_sums(ones: torch.Tensor, node: fx.Node, rank: int) -> torch.Tensor:
    pool = getattr(functional, f"avg_pool{rank}d")
    kernel, *rest = node.args[1:]
    stride, padding, ceil_mode = [*rest, *[(), 0, False][len(rest) :]][:3]
    sizes = spread(kernel, rank)  # type: ignore[arg-type]
    named = {"stride": stride or sizes, "padding": padding, "ceil_mode": ceil_mode}
    if rank == 1:
        # Only the average over real elements, and whole windows, tell how many there are.
        unsqueezed = ones.unsqueeze(-2)
        wide = {k: (v if k == "ceil_mode" else [1 if k == "stride" else 0, *spread(v, 1)])
                for k, v in named.items()}
        return functional.avg_pool2d(unsqueezed, [1, *sizes], **wide, divisor_override=1).squeeze(-2)
    return pool(ones, kernel, **named, divisor_override=1)


@converts(
    aten.adaptive_avg_pool1d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    dtypes=FLOATS,
)
def _adaptive_avg_pool(ctx: Writer, node: fx.Node, x: fx.Node, size: Sequence[int]) -> str:
    rank = int(str(node.target).split("avg_pool")[1][0])
    return _adaptive(ctx, x, shape_of(node), "avg", rank)


@converts(
    aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, dtypes=FLOATS
)
def _adaptive_max_pool(
    ctx: Writer, node: fx.Node, x: fx.Node, size: Sequence[int]
) -> tuple[str, None]:
    rank = int(str(node.target).split("max_pool")[1][0])
    result = [int(n) for n in node.meta["val"][0].shape]
    return _adaptive(ctx, x, result, "max", rank), None


def _adaptive(ctx: Writer, x: fx.Node, result: Sequence[int], kind: str, rank: int) -> str:
    text = ctx.call(
        f"nn.adaptive_{kind}_pool{rank}d",
        _batched(ctx, x, rank),
        output_size=list(result[-rank:]),
        layout=_LAYOUT[rank],
    )
    return _as_result(ctx, text, x, result, rank)


def scale_is_ratio(size: int, result: int, factor: float | None) -> bool:
    """Whether PyTorch resizes by the ratio of the sizes: no factor is given, or an equal one."""
    return factor is None or factor * size == result


@converts(
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec,
    dtypes=FLOATS,
)
def _resize(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    size: Sequence[int] | None,
    *rest: object,
) -> str:
    *aligned, factors = rest
    before, after = shape_of(x)[-2:], shape_of(node)[-2:]
    given = list(factors) if isinstance(factors, list | tuple) else [None, None]
    if not all(scale_is_ratio(*each) for each in zip(before, after, given, strict=True)):
        raise Refused(f"a scale factor that differs from the ratio of {before} and {after}")
    method, mode, rounding = "nearest_neighbor", "asymmetric", "floor"
    if aligned:
        linear = "bilinear" in str(node.target)
        method, rounding = "linear" if linear else "cubic", ""
        mode = "align_corners" if aligned[0] else "half_pixel"
    elif any(a % b and b % a for b, a in zip(before, after, strict=True)):
        raise Refused("the nearest element at a ratio of sizes that is no integer")
    return ctx.call(
        "image.resize2d",
        ctx.value(x),
        size=list(after),
        roi=[0.0, 0.0, 0.0, 0.0],
        layout="NCHW",
        method=method,
        coordinate_transformation_mode=mode,
        rounding_method=rounding,
        cubic_alpha=-0.75,
        cubic_exclude=0,
    )

"""Converters of pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmbridge.relay.registry import FLOATS, converts
from tvmbridge.relay.windows import Windows
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

aten = torch.ops.aten

LAYOUT = {1: "NCW", 2: "NCHW", 3: "NCDHW"}
Numbers = Sequence[int]


def _rank(node: fx.Node) -> int:
    """Return the number of spatial dimensions, from the operator's name."""
    name = str(node.target)
    return next(rank for rank in LAYOUT if f"{rank}d" in name)


def _results(node: fx.Node) -> list[int]:
    value = node.meta["val"]
    return [int(n) for n in (value if isinstance(value, torch.Tensor) else value[0]).shape]


def _pool(ctx: Writer, node: fx.Node, x: fx.Node, kind: str, **named: object) -> str:
    """Emit a pool, with a batch dimension for a time if its operand has none."""
    rank, shape, text = _rank(node), shape_of(x), ctx.value(x)
    unbatched = len(shape) == rank + 1
    text = ctx.reshape(text, [1, *shape]) if unbatched else text
    text = ctx.call(f"nn.{kind}_pool{rank}d", text, **named, layout=LAYOUT[rank])
    return ctx.reshape(text, _results(node)) if unbatched else text


def _windows(node: fx.Node, x: fx.Node, numbers: tuple[Any, ...], ceil_mode: bool) -> Windows:
    """Return the windows of a pool; ``numbers``: kernel, stride, padding and dilation."""
    rank = _rank(node)
    return Windows.of(shape_of(x)[-rank:], _results(node)[-rank:], numbers, ceil_mode=ceil_mode)


def _named(windows: Windows) -> dict[str, object]:
    return {
        "pool_size": windows.sizes,
        "strides": windows.strides,
        "padding": windows.padding,
    }


@converts(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, dtypes=FLOATS)
def _max_pool(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    kernel: Numbers,
    stride: Numbers = (),
    padding: Numbers = (0,),
    dilation: Numbers = (1,),
    ceil_mode: bool = False,
) -> tuple[str, None]:
    windows = _windows(node, x, (kernel, stride, padding, dilation), ceil_mode)
    named = _named(windows)
    return _pool(ctx, node, x, "max", **named, dilation=windows.dilation), None


@converts(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, dtypes=FLOATS)
def _avg_pool(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    kernel: Numbers,
    stride: Numbers = (),
    padding: Numbers = (0,),
    ceil_mode: bool = False,
    *_: object,
    **named: object,
) -> str:
    windows = _windows(node, x, (kernel, stride, padding, 1), ceil_mode)
    text = _pool(ctx, node, x, "avg", **_named(windows), count_include_pad=True)
    factors = _factors(node, x, windows)
    if bool(torch.isclose(factors, torch.ones(())).all()):
        return text
    return ctx.call("multiply", text, ctx.constant(factors.to(dtype_of(node))))


def _factors(node: fx.Node, x: fx.Node, windows: Windows) -> torch.Tensor:
    """Return the ratio of PyTorch's averages to Relay's, which divides by the whole window.

    PyTorch's divisor also depends on ``count_include_pad``, ``divisor_override`` and the elements
    behind the padding.
    """
    rank = _rank(node)
    pool = getattr(functional, f"avg_pool{rank}d")
    ones = torch.ones(1, 1, *shape_of(x)[-rank:])
    theirs = pool(ones, *node.args[1:], **node.kwargs)
    ours = pool(functional.pad(ones, windows.pairs), windows.sizes, windows.strides)
    ratio: torch.Tensor = (theirs / ours)[0, 0]
    return ratio


@converts(
    aten.adaptive_avg_pool1d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    dtypes=FLOATS,
)
def _adaptive_avg_pool(ctx: Writer, node: fx.Node, x: fx.Node, size: Numbers) -> str:
    return _pool(ctx, node, x, "adaptive_avg", output_size=_results(node)[-_rank(node) :])


@converts(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, dtypes=FLOATS)
def _adaptive_max_pool(ctx: Writer, node: fx.Node, x: fx.Node, size: Numbers) -> tuple[str, None]:
    sizes = _results(node)[-_rank(node) :]
    return _pool(ctx, node, x, "adaptive_max", output_size=sizes), None

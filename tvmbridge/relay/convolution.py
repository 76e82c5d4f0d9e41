"""Converters of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.legalize.aten.windows import each
from tvmbridge.relay.registry import FLOATS, Refused, converts
from tvmbridge.relay.writer import Writer, shape_of

aten = torch.ops.aten

_DATA = {1: "NCW", 2: "NCHW", 3: "NCDHW"}
_KERNEL = {1: "OIW", 2: "OIHW", 3: "OIDHW"}
_TRANSPOSED_KERNEL = {1: "IOW", 2: "IOHW", 3: "IODHW"}
# Relay computes these only with one group.
_WITHOUT_GROUPS = ("nn.conv3d", "nn.conv1d_transpose", "nn.conv3d_transpose")


@converts(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, dtypes=FLOATS)
def _conv(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> str:
    return _convolution(ctx, node, x, weight, bias, stride, padding, dilation, False, (0,), groups)


@converts(aten.convolution.default, dtypes=FLOATS)
def _convolution(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    kernel, shape = shape_of(weight), shape_of(x)
    rank = len(kernel) - 2
    channels = kernel[1] * groups if transposed else kernel[0]
    named: dict[str, Any] = {
        "strides": each(stride, rank),
        "padding": each(padding, rank) * 2,
        "dilation": each(dilation, rank),
        "kernel_size": list(kernel[2:]),
        "data_layout": _DATA[rank],
        "kernel_layout": (_TRANSPOSED_KERNEL if transposed else _KERNEL)[rank],
    }
    name = f"nn.conv{rank}d"
    if transposed:
        if any(d != 1 for d in named["dilation"]):
            raise Refused("a dilated transposed convolution")
        name, named["output_padding"] = f"{name}_transpose", each(output_padding, rank)
    data, unbatched = ctx.value(x), len(shape) == rank + 1
    data = ctx.reshape(data, [1, *shape]) if unbatched else data
    filters = ctx.value(weight)
    if rank == 2 and not transposed and groups > 1 and kernel[1] == 1:
        # Relay's depthwise kernels have the dimensions (channels, multiplier, height, width).
        filters = _depthwise(ctx, filters, kernel, groups)
    call = _Grouped(name, channels, groups, named)
    text = _in_groups(ctx, call, data, filters) if call.is_split else call.emit(ctx, data, filters)
    if bias is not None:
        text = ctx.call("nn.bias_add", text, ctx.value(bias), axis=1)
    return ctx.reshape(text, shape_of(node)) if unbatched else text


def _depthwise(ctx: Writer, filters: str, kernel: Sequence[int], groups: int) -> str:
    wanted = [groups, kernel[0] // groups, *kernel[2:]]
    return filters if wanted == list(kernel) else ctx.reshape(filters, wanted)


class _Grouped:
    """A convolution that is called once, or once for each group."""

    def __init__(self, name: str, channels: int, groups: int, named: dict[str, Any]) -> None:
        self.name, self.channels, self.groups, self.named = name, channels, groups, named

    @property
    def is_split(self) -> bool:
        """Whether each group has a convolution of its own."""
        return self.groups > 1 and self.name in _WITHOUT_GROUPS

    def emit(self, ctx: Writer, data: str, filters: str) -> str:
        """Emit the call."""
        return ctx.call(
            self.name, data, filters, channels=self.channels, groups=self.groups, **self.named
        )


def _in_groups(ctx: Writer, call: _Grouped, data: str, filters: str) -> str:
    """Emit a convolution for each group, and concatenate the channels."""
    groups = call.groups
    parts = ctx.call("split", data, indices_or_sections=groups, axis=1)
    weights = ctx.call("split", filters, indices_or_sections=groups, axis=0)
    one = _Grouped(call.name, call.channels // groups, 1, call.named)
    results = [one.emit(ctx, f"{parts}.{g}", f"{weights}.{g}") for g in range(groups)]
    return ctx.call("concatenate", ctx.pack(results), axis=1)

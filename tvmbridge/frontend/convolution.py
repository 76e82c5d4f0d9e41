"""Converters of convolutions: Relax's operator, followed by an addition of the bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, Declined, converts
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.kernels.convolution import Convolution
from tvmbridge.legalize.aten.windows import each

aten = torch.ops.aten

_DTYPES = FLOATS | {torch.float16, torch.bfloat16}
_MOST_DIMENSIONS = 3


@converts(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, dtypes=_DTYPES)
def _plain(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> relax.Expr:
    return _convolution(ctx, node, x, weight, bias, stride, padding, dilation, False, (0,), groups)


@converts(aten.convolution.default, dtypes=_DTYPES)
def _convolution(
    ctx: Importer,
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
) -> relax.Expr:
    rank = len(shape_of(weight)) - 2
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise Declined("a convolution of more than three dimensions")
    if len({result_dtype(n) for n in node.all_input_nodes}) > 1:
        raise Declined("operands of different dtypes")
    convolution = Convolution(
        stride=tuple(each(stride, rank)),
        padding=tuple(each(padding, rank)),
        dilation=tuple(each(dilation, rank)),
        transposed=transposed,
        output_padding=tuple(each(output_padding, rank)),
        groups=groups,
    )
    ends = zip(convolution.output_padding, convolution.stride, strict=True)
    if transposed and any(end >= step for end, step in ends):
        raise Declined("an output padding that Relax does not take")
    data = ctx.value(x)
    if len(shape_of(x)) == rank + 1:
        data = ctx.emit(relax.op.expand_dims(data, 0))
    result = ctx.emit(convolution.of_operands(data, ctx.value(weight)))
    if bias is not None:
        (channels,) = shape_of(bias)
        row = ctx.emit(relax.op.reshape(ctx.value(bias), (1, channels, *[1] * rank)))
        result = ctx.emit(relax.op.add(result, row))
    return result if len(shape_of(node)) == rank + 2 else relax.op.reshape(result, shape_of(node))

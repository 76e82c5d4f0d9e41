"""Converters of resized images."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from tvmbridge.relay.registry import FLOATS, Refused, converts
from tvmbridge.relay.writer import Writer, shape_of

aten = torch.ops.aten


@converts(
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.vec,
    dtypes=FLOATS,
)
def _resize(
    ctx: Writer, node: fx.Node, x: fx.Node, size: Sequence[int] | None, *rest: object
) -> str:
    *aligned, factors = rest
    before, after = shape_of(x)[-2:], shape_of(node)[-2:]
    exact = all(
        want % have == 0 or have % want == 0 for have, want in zip(before, after, strict=True)
    )
    even = _are_ratios(before, after, factors)
    if not aligned and not (exact and even):
        return _taken(ctx, node, x)
    if not even and not (aligned and aligned[0]):
        raise Refused(f"factors that differ from the ratio of the sizes {before} and {after}")
    named = {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric"}
    named["rounding_method"] = "floor"
    if aligned:
        linear = node.target is aten.upsample_bilinear2d.vec
        named = {"method": "linear" if linear else "cubic", "rounding_method": ""}
        mode = "align_corners" if aligned[0] else "half_pixel"
        named["coordinate_transformation_mode"] = mode
    return ctx.call(
        "image.resize2d",
        ctx.value(x),
        size=after,
        roi=[0.0] * 4,
        layout="NCHW",
        cubic_alpha=-0.75,
        **named,
    )


def _are_ratios(before: Sequence[int], after: Sequence[int], factors: object) -> bool:
    """Whether PyTorch's factors, if some are given, are the ratios of the sizes, as in Relay."""
    if not isinstance(factors, list | tuple):
        return True
    sizes = zip(before, after, factors, strict=True)
    return all(f is None or Fraction(f) * have == want for have, want, f in sizes)


def _taken(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    """Look the nearest elements up by indices, which PyTorch computes."""
    text, shape = ctx.value(x), shape_of(x)
    resize: Any = node.target
    for axis in (2, 3):
        line = torch.arange(shape[axis], dtype=torch.float32)
        places = line.reshape([1, 1, -1, 1] if axis == 2 else [1, 1, 1, -1]).expand(shape)
        chosen = resize(places, *node.args[1:], **node.kwargs)[0, 0].long()
        index = chosen[:, 0] if axis == 2 else chosen[0]
        text = ctx.call("take", text, ctx.constant(index), axis=axis, mode="clip")
    return text

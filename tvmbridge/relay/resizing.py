"""Converters of resized images."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

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
    if isinstance(factors, list | tuple):
        for have, want, factor in zip(before, after, factors, strict=True):
            if factor is not None and Fraction(factor) * have != want:
                raise Refused(f"the factor {factor} between the sizes {have} and {want}")
    named = {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric"}
    named["rounding_method"] = "floor"
    if aligned:
        linear = node.target is aten.upsample_bilinear2d.vec
        named = {"method": "linear" if linear else "cubic", "rounding_method": ""}
        mode = "align_corners" if aligned[0] else "half_pixel"
        named["coordinate_transformation_mode"] = mode
    elif any(want % have and have % want for have, want in zip(before, after, strict=True)):
        raise Refused("the nearest elements at a ratio of sizes that is no integer")
    return ctx.call(
        "image.resize2d",
        ctx.value(x),
        size=after,
        roi=[0.0] * 4,
        layout="NCHW",
        cubic_alpha=-0.75,
        **named,
    )

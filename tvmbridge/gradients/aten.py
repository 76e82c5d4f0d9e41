"""Gradient rules of ATen calls for pooling and upsampling, by PyTorch's own backward operators.

A rule applies to a call with one tensor operand and one result; indices may be a second result.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.gradients.helpers import shape_of
from tvmbridge.gradients.pulled import AtenRule, Pulled
from tvmbridge.kernels.aten_call import (
    spec_of,
    tensors_of,
)
from tvmbridge.legalize.aten.windows import finds_places

_WITH_INDICES = [0, 1]


def _average(rank: int) -> AtenRule:
    names = "kernel_size stride padding ceil_mode count_include_pad divisor_override"
    overload = f"aten.avg_pool{rank}d_backward.default"
    return lambda pulled: pulled.aten(
        overload, pulled.x, pulled.cotangent, pulled.x, *pulled.named(names)
    )


def _adaptive_average(rank: int) -> AtenRule:
    overload = f"aten._adaptive_avg_pool{rank}d_backward.default"
    return lambda p: p.aten(overload, p.x, p.cotangent, p.x)


def _indices(pulled: Pulled) -> relax.Expr:
    """Return the indices of the maxima that a max pooling chose.

    The indices are the second result of the call if the call returns them. Otherwise backward runs
    the pooling again for its indices alone.
    """
    spec = spec_of(pulled.call)
    if spec["results"] == _WITH_INDICES:
        return pulled.builder.emit(relax.TupleGetItem(pulled.var, 1))
    return pulled.places(pulled.cotangent.ty.shape, compiled=finds_places(spec))


def _largest(rank: int) -> AtenRule:
    """Return the rule of max pooling: the cotangent goes to the maximum, to the first of equals."""
    overload = f"aten.max_pool{rank}d_with_indices_backward.default"

    def rule(pulled: Pulled) -> relax.Expr:
        rest = pulled.named("kernel_size stride padding dilation ceil_mode")
        operands = (pulled.cotangent, pulled.x, *rest, _indices(pulled))
        return pulled.aten(overload, pulled.x, *operands)

    return rule


def _adaptive_largest(rank: int) -> AtenRule:
    overload = f"aten.adaptive_max_pool{rank}d_backward.default"
    return lambda p: p.aten(overload, p.x, p.cotangent, p.x, _indices(p))


def _upsample(kind: str, rank: int) -> AtenRule:
    overload = f"aten.upsample_{kind}{rank}d_backward.default"

    def rule(pulled: Pulled) -> relax.Expr:
        sizes = [list(shape_of(pulled.cotangent))[2:], list(shape_of(pulled.x))]
        corners = [] if kind == "nearest" else pulled.named("align_corners")
        factors = pulled.arguments["scale_factors"] or [None] * rank
        return pulled.aten(overload, pulled.x, pulled.cotangent, *sizes, *corners, *factors)

    return rule


ATEN_RULES: dict[str, AtenRule] = {
    **{f"aten.avg_pool{n}d.default": _average(n) for n in (2, 3)},
    **{f"aten._adaptive_avg_pool{n}d.default": _adaptive_average(n) for n in (2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": _largest(n) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": _adaptive_largest(n) for n in (2, 3)},
    **{
        f"aten.upsample_{kind}{n}d.vec": _upsample(kind, n)
        for kind, n in (
            ("nearest", 2),
            ("linear", 1),
            ("bilinear", 2),
            ("trilinear", 3),
            ("bicubic", 2),
        )
    },
}


def is_pulled_back(call: relax.Call) -> bool:
    """Whether the rule of an ATen call applies: one tensor operand, and one result or indices."""
    tensors = tensors_of(call)
    return spec_of(call)["results"] in (None, [0], _WITH_INDICES) and len(tensors) == 1

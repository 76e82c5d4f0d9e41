"""ATen operators whose derivative by TVM's Gradient equals PyTorch's everywhere.

A decomposition or a converter turns an operator into Relax, and TVM differentiates the result. For
the operators listed here this gives PyTorch's derivative also at kinks, where a side is infinite,
for equal operands, and for fully masked rows. The standard deviation, for example, is not listed.
Its decomposition takes the square root of the variance, whose derivative at 0 is infinite, but
PyTorch's formula gives 0.

Attention has the derivative of softmax. PyTorch's fused kernel deviates from it if a floating-point
mask masks a row with large numbers; ``AutogradWatch`` records such masks.

``CLAIMED`` says whether Relax has a gradient rule for each part of an operator. Names here have no
overload and no underscore of in-place variants.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvmbridge.core.admission import is_proven, note_use

_MOVES = (
    "_reshape_alias _unsafe_view alias cat channel_shuffle clone contiguous copy detach "
    "expand fill flip lift_fresh lift_fresh_copy permute pixel_shuffle pixel_unshuffle repeat "
    "reshape roll select select_scatter slice split split_with_sizes squeeze stack t _to_copy "
    "transpose tril triu unbind unsafe_split unsafe_split_with_sizes unsqueeze view where zero "
    "masked_fill embedding gather index index_add index_copy index_fill index_put index_select "
    "scatter scatter_add sort msort take_along_dim topk"
)
_ELEMENTWISE = (
    "abs add addcmul cos div erf exp gelu log maximum minimum mul native_dropout neg pow "
    "reciprocal relu rsqrt rsub sigmoid silu sin sqrt sub tanh"
)
_PRODUCTS = "addmm addr baddbmm bmm dot linear matmul mm mv vdot"
_REDUCTIONS = (
    "_log_softmax _safe_softmax _scaled_dot_product_flash_attention_for_cpu _softmax amax amin "
    "cumsum mean mse_loss native_batch_norm native_group_norm native_layer_norm nll_loss2d_forward "
    "nll_loss_forward sum trace"
)
_WINDOWS = (
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d "
    "avg_pool3d convolution max_pool2d_with_indices max_pool3d_with_indices upsample_bicubic2d "
    "upsample_bilinear2d upsample_linear1d upsample_nearest2d upsample_trilinear3d"
)

# A claim counts only for dtypes that conformance tests admitted (tvmbridge/core/admission.py).
SAME_DERIVATIVE: frozenset[str] = frozenset(
    f"aten::{name}"
    for group in (_MOVES, _ELEMENTWISE, _PRODUCTS, _REDUCTIONS, _WINDOWS)
    for name in group.split()
)


def has_same_derivative(schema_name: str, dtypes: Iterable[str]) -> bool:
    """Whether TVM's Gradient differentiates an operator as PyTorch does in all of ``dtypes``.

    ``schema_name`` is a name such as ``aten::add_``.
    """
    name = schema_name.removesuffix("_")
    if name not in SAME_DERIVATIVE:
        return False
    note_use("derivatives", name, dtypes)
    return is_proven("derivatives", name, dtypes)

"""The quick set: operators that native converters serve, few samples of each."""

from __future__ import annotations

# Samples of an entry, beside the variants of one of them.
QUICK_LIMIT = 2

_NAMES = """
    abs add all amax amin any bitwise_and bitwise_not bmm cat clamp clone
    constant_pad_nd div:no_rounding_mode eq erf exp expand flip float ge isinf isnan
    log logical_not lt masked_fill matmul maximum mean mul ne neg
    nn.functional.batch_norm nn.functional.dropout nn.functional.embedding nn.functional.gelu
    nn.functional.group_norm nn.functional.hardswish nn.functional.hardtanh
    nn.functional.layer_norm nn.functional.leaky_relu nn.functional.linear nn.functional.relu
    nn.functional.silu permute pow repeat rsqrt rsub select sigmoid sign slice softmax
    log_softmax split split_with_sizes sqrt squeeze stack std sub sum tanh to tril unbind
    var_mean view where full_like
"""

QUICK_OPERATORS = tuple(_NAMES.split())

# All of them in float32; in each of the others a few, other ones in each.
QUICK_OTHERS = ("float64", "int64", "bool", "bfloat16")
QUICK_STEP = 5

_GRADIENTS = """
    abs amax div:no_rounding_mode cat matmul maximum nn.functional.gelu nn.functional.layer_norm
    nn.functional.embedding softmax where
"""

# Their gradients are checked too, by both sources of the joint function.
QUICK_GRADIENTS = tuple(_GRADIENTS.split())

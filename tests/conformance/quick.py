"""The quick set of conformance: operators that TVM compiles natively, with few samples each."""

from __future__ import annotations

# Samples of an entry; the variants of one sample come on top.
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

# float32 runs all operators; each of these dtypes runs every QUICK_STEP-th one, from its own start.
QUICK_OTHERS = ("float64", "int64", "bool", "bfloat16")
QUICK_STEP = 5

_GRADIENTS = """
    abs amax div:no_rounding_mode cat matmul maximum nn.functional.gelu nn.functional.layer_norm
    nn.functional.embedding softmax where
"""

# Operators whose gradients are checked too, with both sources of the joint function.
QUICK_GRADIENTS = tuple(_GRADIENTS.split())

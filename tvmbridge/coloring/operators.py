"""Classify operators for coloring: cheap to repeat, bitwise repeatable, or continuous."""

from __future__ import annotations

import math
from collections.abc import Collection

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import aten_call_operator, resolve_overload
from tvmbridge.passes.base import dtype_of, shape_of


def _names(text: str) -> frozenset[str]:
    return frozenset(f"relax.{name}" for name in text.split())


# Rearrangements and fills: keeping a result would cost memory, and repeating it costs nothing.
VIEWS = _names("reshape permute_dims expand_dims squeeze broadcast_to full ones zeros")

_MOVES = _names(
    "astype concat flip repeat split stack strided_slice tile tril triu arange full_like "
    "ones_like zeros_like"
)
_CONTINUOUS_EXACT = _names("abs clip maximum minimum negative nn.relu where")
# A difference of one unit in the last place of an operand may change the result completely.
_JUMPS = _names(
    "equal not_equal greater greater_equal less less_equal sign floor ceil round trunc isnan isinf "
    "isfinite logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor "
    "bitwise_not left_shift right_shift"
)
_ROUNDED = _names(
    "add subtract multiply divide power square sqrt rsqrt exp log sin cos tan sinh cosh tanh asin "
    "acos atan asinh acosh atanh erf sigmoid log_add_exp nn.gelu nn.gelu_tanh nn.silu nn.selu "
    "nn.softplus nn.leakyrelu"
)
_REDUCTIONS = _names("sum mean max min")
# Operators that tvmbridge computes in loops along rows.
_ROW_WISE = _names("nn.softmax nn.log_softmax nn.layer_norm variance std prod")
_SMOOTH_PRODUCTS = _names(
    "matmul nn.softmax nn.log_softmax nn.layer_norm variance std prod take scatter_elements "
    "collapse_sum_to nn.conv1d nn.conv2d nn.conv3d nn.conv1d_transpose nn.conv2d_transpose "
    "nn.conv3d_transpose grad.take_backward grad.avg_pool2d_backward grad.nll_loss_backward"
)
_SMOOTH_ATEN_NAMES = (
    "convolution convolution_backward native_batch_norm_backward native_layer_norm_backward "
    "native_group_norm_backward native_layer_norm native_group_norm mm bmm addmm "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward "
    "embedding embedding_dense_backward gather index_select index_add index_put scatter_add "
    "slice_scatter select_scatter constant_pad_nd cumsum avg_pool2d avg_pool2d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward "
    "max_pool2d_with_indices_backward "
    "_fused_rms_norm _fused_rms_norm_backward cudnn_batch_norm_backward batch_norm_backward "
    "_softmax_backward_data _log_softmax_backward_data gelu_backward silu_backward "
    "_weight_norm_interface _weight_norm_interface_backward addmv baddbmm dot linear_backward "
    "avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward "
    "upsample_linear1d upsample_linear1d_backward upsample_bicubic2d upsample_bicubic2d_backward "
    "upsample_trilinear3d upsample_trilinear3d_backward upsample_nearest1d "
    "upsample_nearest1d_backward upsample_nearest3d upsample_nearest3d_backward "
    "reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward "
    "replication_pad2d replication_pad2d_backward _fft_r2c _fft_c2r _fft_c2c logcumsumexp cumprod"
)
# Their forward kernels may draw a dropout mask.
_ATTENTION_BACKWARD_NAMES = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention_backward"
)
_ATTENTION_NAMES = (
    "attention fused_attention fused_attention_backward fused_attention_backward_with_bias"
)
# Kernels that may draw a dropout mask themselves.
_MAY_DRAW = "tvmbridge.fused_attention"
_SMOOTH_ATEN = frozenset(
    ["aten.index.Tensor"]
    + [f"aten.{name}.default" for name in _SMOOTH_ATEN_NAMES.split()]
    + [f"aten.{name}.default" for name in _ATTENTION_BACKWARD_NAMES.split()]
    + [f"tvmbridge.{name}.default" for name in _ATTENTION_NAMES.split()]
)

_ELEMENTWISE = VIEWS | _MOVES | _CONTINUOUS_EXACT | _JUMPS | _ROUNDED
_EXACT = VIEWS | _MOVES | _CONTINUOUS_EXACT | _JUMPS
_SMOOTH = VIEWS | _MOVES | _CONTINUOUS_EXACT | _ROUNDED | _REDUCTIONS | _SMOOTH_PRODUCTS

# A reduction whose operand is more than this many times larger is kept rather than repeated.
_SHORT = 4


def operator_name(call: relax.Expr | None) -> str | None:
    """Return the name of an operator (``relax.add``) or of an ATen call's overload, or None."""
    if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
        return None
    return aten_call_operator(call) or str(call.op.name)


def check_names(names: Collection[str]) -> None:
    """Raise ValueError for a name of no operator, or of one that must not be repeated."""
    for name in names:
        if name.startswith(_MAY_DRAW):
            raise ValueError(f"{name} may have dropout, which is drawn once")
        try:
            if name.startswith("relax."):
                tvm.ir.Op.get(name)
            else:
                resolve_overload(name)
        except (AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"there is no operator {name!r}; give names such as 'relax.nn.conv2d' or "
                "'aten.avg_pool2d.default'"
            ) from error


def is_cheap(value: relax.Expr) -> bool:
    """Whether computing ``value`` twice is cheap, because it fuses into the loops that read it.

    Cheap values are element-wise operators, rearrangements, fills, constants, tuples and their
    items, and reductions whose result is not much smaller than their operand.
    """
    if isinstance(value, tvm.ir.GenericConst | relax.Tuple | relax.TupleGetItem | relax.Var):
        return True
    name = operator_name(value)
    if name in _REDUCTIONS:
        return 0 < _count(value.args[0]) <= _SHORT * _count(value)
    return name in _ELEMENTWISE


def fuses(value: relax.Expr) -> bool:
    """Whether ``value`` is computed in a generated loop, into which its operands can be fused.

    Products, convolutions and calls of PyTorch's kernels do not fuse: they read their operands
    from memory.
    """
    name = operator_name(value)
    return name is None or name in _ELEMENTWISE or name in _REDUCTIONS or name in _ROW_WISE


def is_elementwise(value: relax.Expr) -> bool:
    """Whether ``value`` is a call of an element-wise operator or a rearrangement."""
    return operator_name(value) in _ELEMENTWISE


def is_view(value: relax.Expr) -> bool:
    """Whether ``value`` is a rearrangement, a fill or a constant."""
    return isinstance(value, tvm.ir.GenericConst) or operator_name(value) in VIEWS


def repeats_every_bit(value: relax.Expr) -> bool:
    """Whether a second computation from the same operands gives the same bits.

    Rounded arithmetic may not: in another fused loop the compiler may contract a product and a sum
    into one operation, which rounds once.
    """
    if not isinstance(value, relax.Call):
        return True
    return operator_name(value) in _EXACT or not is_floating(value)


def is_smooth(value: relax.Expr) -> bool:
    """Whether a rounding difference in the operands changes the result by a rounding difference.

    False for comparisons, rounding to integers, sorting and unknown kernels.
    """
    if not isinstance(value, relax.Call):
        return True
    name = operator_name(value)
    if name == "relax.astype":
        return is_floating(value)
    return name in _SMOOTH or name in _SMOOTH_ATEN


def may_run_twice(value: relax.Expr) -> bool:
    """Whether a second computation gives the same result up to rounding, at whatever cost.

    False for operators that are not continuous or not known, and for kernels that may draw.
    """
    name = operator_name(value)
    if name is None:
        return is_cheap(value)
    return (name in _SMOOTH or name in _SMOOTH_ATEN) and not name.startswith(_MAY_DRAW)


def is_floating(value: relax.Expr) -> bool:
    """Whether ``value`` is a tensor with a floating-point dtype."""
    return isinstance(value.ty, relax.TensorType) and "float" in dtype_of(value)


def _count(expr: relax.Expr) -> int:
    shape = shape_of(expr)
    return 0 if shape is None else math.prod(shape)

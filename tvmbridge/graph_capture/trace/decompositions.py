"""The decomposition tables of the capture and of joint graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch.export import default_decompositions

from tvmbridge.core.torch_private import (
    DispatchKey,
    core_aten_decompositions,
    disable_current_modes,
    registered_kernels,
)
from tvmbridge.graph_capture.trace.attention import attention, attention_with_dropout, safe_softmax
from tvmbridge.graph_capture.trace.composites import operators_known
from tvmbridge.graph_capture.trace.extremes import EXTREMUM, extremum_taken_apart
from tvmbridge.graph_capture.trace.losses import nll_loss
from tvmbridge.graph_capture.trace.promotion import promoting_as_kernels
from tvmbridge.graph_capture.trace.recurrent import recurrent_decompositions

aten = torch.ops.aten

# Operators that are not decomposed, because the frontend or a kernel handles them better whole.
# Random operators are not decomposed either: their parts would draw other numbers than eager.
_KEPT_WHOLE = (
    aten.linear.default,
    aten.matmul.default,
    aten.rms_norm.default,
    # PyTorch 2.11 decomposes them to clamp, which treats a bound of NaN differently.
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
    aten.upsample_bicubic2d.vec,
    # Their parts multiply infinities by weights of 0, which gives NaN.
    aten.upsample_linear1d.vec,
    aten.upsample_trilinear3d.vec,
    # Its parts subtract the sum after the product, so that two infinities can cancel to NaN.
    aten._softmax_backward_data.default,
    # Their parts propagate NaN, which the kernels ignore.
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    # Their parts return results for values and indices for which the kernels raise.
    aten.binary_cross_entropy.default,
    aten.index_copy.default,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    # Its parts read a 0-d index as a number.
    aten.take.default,
    # Their parts round differently, which changes results of integer dtypes.
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
    aten.logspace.default,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
    # Each is a single loop nest in TVM: a fill, and sums of overlapping windows.
    aten.fill.Scalar,
    aten.col2im.default,
)

# Not decomposed for half precision: their kernels compute in float32 and round only the result.
_ROUNDED_ONCE = (
    aten._weight_norm_interface.default,
    aten.huber_loss.default,
    aten.index_add.default,
    aten.logit.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.special_entr.default,
    aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar,
    aten.special_xlog1py.self_scalar,
    aten.xlogy.Tensor,
    aten.xlogy.Scalar_Other,
    aten.xlogy.Scalar_Self,
)

# Random only because of dropout among their parts, whose decomposition draws as eager PyTorch does.
_DRAWN_IN_PARTS = (
    "aten.scaled_dot_product",
    "aten._scaled_dot_product",
    "aten.lstm",
    "aten.gru",
    "aten.rnn_relu",
    "aten.rnn_tanh",
)

# Operators of joint graphs that consist of data movement and element-wise operators.
_JOINT_TAKEN_APART = (
    aten._unsafe_view.default,
    aten.addcdiv.default,
    aten.addcmul.default,
    aten.baddbmm.default,
    aten.detach.default,
    aten.diagonal_backward.default,
    aten.fill.Scalar,
    aten.masked_fill.Tensor,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.native_dropout_backward.default,
    aten.new_empty.default,
    aten.select_backward.default,
    aten.select_scatter.default,
    aten.silu.default,
    aten.slice_backward.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.zero.default,
)
# In half precision the parts have the values of PyTorch's kernels, of NaN and infinities too.
_JOINT_OF_HALVES = (
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
)


def decomposition_table(*, differentiated: bool) -> dict[Any, Callable[..., Any]]:
    """Return a map from overload to decomposition for ``ExportedProgram.run_decompositions``.

    Args:
        differentiated: whether the graph will be differentiated. Attention is then decomposed,
            because TVM's Gradient needs its parts. Otherwise it is decomposed only if it has
            dropout, whose mask must be drawn outside.
    """
    registered = registered_kernels("CompositeImplicitAutograd")
    return dict(_table_with(differentiated, tuple(registered)))


@lru_cache(maxsize=2)
def _table_with(differentiated: bool, registered: tuple[str, ...]) -> dict[Any, Callable[..., Any]]:
    """Return the table for these registered operators.

    The result is cached, because building it takes longer than the export of a small module.
    """
    with operators_known(registered):
        table: dict[Any, Callable[..., Any]] = dict(default_decompositions())
    random = [op for op in table if torch.Tag.nondeterministic_seeded in op.tags]
    for op in (*_KEPT_WHOLE, *random):
        if not str(op).startswith(_DRAWN_IN_PARTS):
            table.pop(op, None)
    table = promoting_as_kernels(table)
    table.update(recurrent_decompositions(table))
    table[aten.sort.default] = sort_as_eager
    table.update({op: _unless_half(table[op]) for op in _ROUNDED_ONCE if op in table})
    table[aten._safe_softmax.default] = safe_softmax
    for op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        table[op] = nll_loss(table[op])
    sdpa = aten.scaled_dot_product_attention.default
    if differentiated:
        table[sdpa] = attention
        # TVM's product rule for the parts would add infinities of both signs for an infinite
        # cotangent.
        table[aten.silu.default] = _of_halves(table[aten.silu.default])
    else:
        table[sdpa] = attention_with_dropout
        # Its parts return the weights in place of the sums that backward reads.
        table.pop(aten._scaled_dot_product_flash_attention_for_cpu.default, None)
        # Its parts read a table of indices; unlike the operator, the parts have a gradient rule.
        table.pop(aten.roll.default, None)
    table[aten.rrelu.default] = _rrelu
    table[EXTREMUM] = extremum_taken_apart
    for op in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor):
        if op in table:
            table[op] = _index_fill(table[op])
    return table


def _index_fill(parts: Callable[..., Any]) -> Callable[..., Any]:
    """Extend the decomposition ``parts`` of ``index_fill`` to other strides and negative indices.

    The strides of the operand are kept. ``parts`` uses ``index_copy``, which takes no negative
    index.
    """

    def decompose(x: torch.Tensor, dim: int, index: torch.Tensor, *value: Any) -> Any:
        rows = x.shape[dim] if x.dim() else 1
        index = torch.where(index < 0, index + rows, index)
        if x.stride() == torch.empty(x.shape, device="meta").stride():
            return parts(x, dim, index, *value)
        result = parts(x.clone(memory_format=torch.contiguous_format), dim, index, *value)
        return _copy(torch.empty_like(x), result)

    return decompose


def _unless_half(parts: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict the decomposition ``parts`` to operands that have no half precision."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        halves = not dtypes.isdisjoint((torch.float16, torch.bfloat16))
        return NotImplemented if halves else parts(*args, **kwargs)

    return decompose


def _of_halves(parts: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict the decomposition ``parts`` to half-precision operands."""

    def decompose(x: torch.Tensor, *others: Any) -> Any:
        halves = x.dtype in (torch.float16, torch.bfloat16)
        return parts(x, *others) if halves else NotImplemented

    return decompose


def _rrelu(
    x: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Decompose ``rrelu`` into ``rrelu_with_noise``; the noise is 1 for positive elements."""
    if not training:
        return aten.leaky_relu(x, (lower + upper) / 2)
    slopes = torch.empty_like(x, memory_format=torch.contiguous_format)
    functional = aten.rrelu_with_noise_functional
    return functional(x, slopes, lower, upper, True, generator=generator)[0]


# PyTorch decomposes them under the Autograd key, before it uses a decomposition table.
_WHOLE_UNDER_AUTOGRAD = (aten.multi_margin_loss.default,)


@contextmanager
def kept_whole_under_autograd() -> Iterator[None]:
    """Remove the decompositions of the operators above under the Autograd key in the context."""
    with ExitStack() as stack:
        for op in _WHOLE_UNDER_AUTOGRAD:
            stack.enter_context(mock.patch.dict(op.py_kernels))
            op.py_kernels.pop(DispatchKey.Autograd, None)
            op._dispatch_cache.clear()
            stack.callback(op._dispatch_cache.clear)
        yield


def joint_decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Return a map from overload to decomposition for a joint graph of AOTAutograd.

    An operator that is not in the map stays an ATen operator with PyTorch's own kernel.
    """
    return dict(_joint_table())


@lru_cache(maxsize=1)
def _joint_table() -> dict[Any, Callable[..., Any]]:
    """Return the table, which is kept: PyTorch queries its dispatcher to build its own."""
    whole = core_aten_decompositions()
    table = {op: whole[op] for op in _JOINT_TAKEN_APART}
    losses = (aten.mse_loss.default, aten.mse_loss_backward.default)
    return table | {
        **{op: _unless_half(whole[op]) for op in losses},
        **{op: _of_halves(whole[op]) for op in _JOINT_OF_HALVES},
        aten.copy.default: _copy,
        EXTREMUM: extremum_taken_apart,
        aten.sort.default: sort_as_eager,
        aten.view.default: _view,
        aten._safe_softmax.default: safe_softmax,
    }


def sort_as_eager(x: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:
    """Decompose a sort of stride 0, of equal elements, to a stable sort, as eager PyTorch does."""
    if not x.dim() or x.stride(dim) or x.shape[dim] < 2:
        return NotImplemented
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _view(x: torch.Tensor, shape: Sequence[int]) -> Any:
    """Decompose ``view`` into a copy if a decomposition gave ``x`` strides that allow no view."""
    with disable_current_modes():
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        try:
            meta.view(shape)
        except RuntimeError:
            pass
        else:
            return NotImplemented
    return x.clone(memory_format=torch.contiguous_format).view(shape)


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Return the functional form of ``x.copy_(source)``; only metadata of ``x`` is read.

    The order of the strides of ``x`` is kept. ``x`` may be a view of a tensor that is written; the
    new value of that tensor is then a view of the result.
    """
    result = source.to(x.device, x.dtype).expand(x.shape)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    if order == list(range(x.dim())) or result.stride() == x.stride():
        return result
    back = [order.index(d) for d in range(x.dim())]
    return result.permute(order).contiguous().permute(back)

"""Decompose attention if it has dropout or a gradient, or choose its fused kernel on GPUs."""

from __future__ import annotations

import inspect
import math
import types
from typing import Any

import torch
from torch.nn import functional

from tvmbridge.core.autocast import without_autocast
from tvmbridge.graph_capture.trace.function_table import Call, replaces
from tvmbridge.graph_capture.trace.fused_attention import (
    fused_attention,
    fused_kernel,
    plain_attention,
)

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


def safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the softmax, with a value and a derivative of 0 instead of NaN for rows of -inf."""
    masked = torch.all(x.eq(float("-inf")), dim=dim, keepdim=True)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    result = torch.softmax(torch.where(masked, zero, x), dim=dim, dtype=dtype)
    return torch.where(masked, zero.to(result.dtype), result)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Decompose attention, half precision in float32; a fully masked row gives zeros."""
    dtype = query.dtype
    if dtype in _HALVES:
        query, key, value = (t.to(torch.float32) for t in (query, key, value))
        mask = (
            attn_mask if attn_mask is None or attn_mask.dtype is torch.bool else attn_mask.float()
        )
        result = attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result.to(dtype)
    if enable_gqa:
        key, value = _repeated(query, key, value)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        rows, columns = (torch.arange(scores.shape[d], device=scores.device) for d in (-2, -1))
        attn_mask = rows[:, None] >= columns
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The mask is added, as in PyTorch: a NaN behind the mask makes gradients NaN there, too.
        closed = torch.zeros(attn_mask.shape, dtype=scores.dtype, device=scores.device)
        attn_mask = torch.where(attn_mask, closed, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    # With a causal mask each row has an open column; another mask may close a whole row.
    may_close = attn_mask is not None and not is_causal
    weights = aten._safe_softmax(scores, -1) if may_close else torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def _repeated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value with their heads repeated to the number of the query's heads."""
    key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    return key, value


def attention_with_dropout(*args: Any, **kwargs: Any) -> Any:
    """Decompose attention that has dropout, whose mask must be an input; leave other attention."""
    dropout_p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return attention(*args, **kwargs) if dropout_p else NotImplemented


_SIGNATURE = inspect.signature(attention)


@replaces(functional.scaled_dot_product_attention)
def _attention_on_gpus(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call attention on a GPU by the operators of ``fused_attention.py`` if PyTorch has a kernel.

    Without a kernel, attention with dropout or a gradient is decomposed: as one operator in the
    graph, its random draws and its derivative would not be visible.
    """
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    query, key, value, mask, dropout_p, is_causal = given.args
    if not query.is_cuda:
        return call(*args, **kwargs)
    scale, enable_gqa = given.kwargs["scale"], given.kwargs["enable_gqa"]
    if torch.is_autocast_enabled("cuda"):
        cast = map(autocast_for_attention, (query, key, value, mask))
        with without_autocast():
            return _attention_on_gpus(call, (*cast, dropout_p, is_causal), given.kwargs)
    tensors = [t for t in (query, key, value, mask) if t is not None]
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not learns and not dropout_p:
        if any(t.dim() != 4 or t.dtype != query.dtype for t in (query, key, value)):
            return call(*args, **kwargs)
        return plain_attention(query, key, value, mask, is_causal, scale, enable_gqa)
    kernel = fused_kernel(query, key, value, mask, dropout_p, is_causal, enable_gqa)
    if not kernel and enable_gqa:
        key, value = _repeated(query, key, value)
        kernel = fused_kernel(query, key, value, mask, dropout_p, is_causal)
    if not kernel:
        return attention(*args, **kwargs)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return fused_attention(query, key, value, mask, dropout_p, is_causal, factor, kernel)


def autocast_for_attention(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``tensor`` as CUDA's autocast passes it to attention."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cuda"))


def attention_on_gpus(*args: Any, **kwargs: Any) -> Any:
    """Call attention on a GPU from a handler, where no mode sees the call."""
    return _attention_on_gpus(Call(functional.scaled_dot_product_attention, ()), args, kwargs)


# A mode sees this function of Python, and nothing that it calls: the copy calls the handler.
_multi_head_attention_forward = types.FunctionType(
    functional.multi_head_attention_forward.__code__,
    {
        **vars(functional),
        "scaled_dot_product_attention": attention_on_gpus,
        # Otherwise the modes of torch.export get the original function, not the copy.
        "has_torch_function": lambda tensors: False,
    },
    argdefs=functional.multi_head_attention_forward.__defaults__,
)


@replaces(functional.multi_head_attention_forward)
def _layer_on_gpus(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a GPU the attention of ``nn.MultiheadAttention`` is handled as any other is."""
    query = args[0] if args else kwargs["query"]
    return (_multi_head_attention_forward if query.is_cuda else call)(*args, **kwargs)

"""Decompose the inference fast paths of PyTorch's attention modules.

In eval mode without gradients, ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call
fused kernels, which differ from the slow path in corner cases. Fully masked rows are NaN, and a
numeric mask counts as a boolean one. ``nn.TransformerEncoder``, which creates nested tensors, gives
zeros for padding.

PyTorch leaves the fast path during a trace. Here the modules stay on it, and the fused kernels are
decomposed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import activation, transformer

from tvmbridge.calls.patches import patched_here, patches
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import native_multi_head_attention, transformer_encoder_layer_fwd
from tvmbridge.graph_capture.trace.function_table import Call, replaces

_ONE_MASK_OF_KEYS = 1  # the kernels' ``mask_type`` for a mask of shape (batch, keys)


# The modules leave the fast path if one of these two functions returns True.
@patches(torch.overrides, "has_torch_function")
@patches(activation, "_is_make_fx_tracing")
def _no(genuine: Any, *args: Any) -> bool:
    return False


def causal_masks_undetected(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which transformers do not compare their masks with the causal mask.

    If a layer is not PyTorch's own, the context does nothing, because the layer may need the
    result.
    """
    if not _has_plain_layers(module):
        return nullcontext()
    return patched_here(transformer, "_detect_is_causal_mask", _detected)


def _has_plain_layers(module: nn.Module) -> bool:
    """Whether all transformer layers are PyTorch's, for which ``is_causal`` is only a hint."""
    plain = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    stacks = [
        m for m in module.modules() if isinstance(m, nn.TransformerEncoder | nn.TransformerDecoder)
    ]
    return all(type(layer) in plain for m in stacks for layer in m.layers)


def _detected(
    genuine: Any,
    mask: torch.Tensor | None,
    is_causal: bool | None = None,
    size: int | None = None,
) -> bool:
    """Replace ``_detect_is_causal_mask`` without a comparison of values.

    Return False if ``is_causal`` is not given: PyTorch's layers then use the mask itself, which
    gives the same result as the hint.
    """
    if is_causal is None and mask is not None and not mask.requires_grad:
        return False
    known: bool = genuine(mask, is_causal, size)
    return known


@replaces(native_multi_head_attention)
def _fused_attention(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _attention(*args, **kwargs)


@replaces(transformer_encoder_layer_fwd)
def _fused_layer(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_autocast_enabled("cpu"):
        raise UnsupportedOperatorError(
            "nn.TransformerEncoderLayer under autocast in eval mode is one kernel in eager "
            "PyTorch, with a result of another dtype than its parts; call it outside of autocast"
        )
    return _layer(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decompose ``aten::_native_multi_head_attention`` for self-attention, of one tensor."""
    batch, length, _ = query.shape
    parts = functional.linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1)
    q, k, v = (p.reshape(batch, length, num_head, -1).transpose(1, 2) for p in parts)
    seen = None if mask is None else _seen(mask, mask_type)
    weights = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        weights = scores.softmax(-1)
        context = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        if seen is not None:
            context = context.masked_fill(~seen.any(-1, keepdim=True), math.nan)
    joined = context.transpose(1, 2).reshape(batch, length, -1)
    return functional.linear(joined, proj_weight, proj_bias), weights


def _seen(mask: torch.Tensor, mask_type: int | None) -> torch.Tensor:
    """Return where a query may attend: a mask that broadcasts to (batch, heads, queries, keys)."""
    hidden = mask if mask.dtype is torch.bool else mask != 0
    return ~(hidden[:, None, None, :] if mask_type == _ONE_MASK_OF_KEYS else hidden)


def _layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """Decompose ``aten::_transformer_encoder_layer_fwd``."""
    projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    activated = functional.gelu if use_gelu else functional.relu

    def attended(x: torch.Tensor) -> torch.Tensor:
        return _attention(
            x, x, x, embed_dim, num_heads, *projections, mask, False, mask_type=mask_type
        )[0]

    def fed_forward(x: torch.Tensor) -> torch.Tensor:
        inner = activated(functional.linear(x, ffn_weight_1, ffn_bias_1))
        return functional.linear(inner, ffn_weight_2, ffn_bias_2)

    def first(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attended(first(src))
        return x + fed_forward(second(x))
    x = first(src + attended(src))
    return second(x + fed_forward(x))


@patches(nn.TransformerEncoder, "forward")
def _encoder(
    genuine: Any,
    self: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """Run ``nn.TransformerEncoder.forward`` with zeros for padding, as with nested tensors.

    If all padding is at the ends of the sequences, eager PyTorch packs them into a nested tensor.
    Each layer then computes only elements that are not padding. Padded to its shape again, the
    result has zeros there. If all elements are padding, eager PyTorch raises; here all are zero.
    """
    if src_key_padding_mask is None or not _nests(self, src, mask):
        result: torch.Tensor = genuine(self, src, mask, src_key_padding_mask, is_causal)
        return result
    if not getattr(self, "mask_check", True):
        raise UnsupportedOperatorError(
            "nn.TransformerEncoder with mask_check=False packs padded sequences without a look at "
            "the mask, which compiled code cannot follow; construct it with "
            "enable_nested_tensor=False"
        )
    output = src
    for layer in self.layers:
        output = layer(output, src_key_padding_mask=src_key_padding_mask)
    seen = src_key_padding_mask.logical_not()
    at_ends = (seen[:, :-1] | ~seen[:, 1:]).all()
    output = output.masked_fill((at_ends & ~seen).unsqueeze(-1), 0.0)
    return output if self.norm is None else self.norm(output)


def _nests(encoder: nn.TransformerEncoder, src: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the encoder converts ``src`` to a nested tensor if the padding mask allows it."""
    first = encoder.layers[0]
    read = (src, *first.parameters())
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and mask is None
        and src.dim() == 3
        and not first.training
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in read))
    )

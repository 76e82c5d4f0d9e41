"""PyTorch's fused kernels of attention on GPUs as operators, forward and backward.

The operators take and return tensors of shape (batch, tokens, heads, size). Projections return this
order of memory, and kernels use it, so that heads are never moved in memory.

With dropout, forward draws the mask within the kernel. Backward makes the same mask again from the
generator state that forward returns. Two calls with dropout on the same tensors have different
results. Each call therefore has its own ``number``, so that the two calls are not taken for one.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.core.torch_private import (
    DisablePythonDispatcher,
    chosen_attention,
    disable_current_modes,
)

aten = torch.ops.aten

FLASH, EFFICIENT, CUDNN = "flash", "efficient", "cudnn"

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias"
_SETTINGS = "str kernel, float dropout_p, bool is_causal, float scale, int number"
_LIBRARY.define(f"fused_attention({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)")
_BACKWARD = (
    "(Tensor gradient, Tensor output, Tensor sums, Tensor seed, Tensor offset, "
    f"{_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor"
)
_LIBRARY.define(f"fused_attention_backward{_BACKWARD})")
_LIBRARY.define(f"fused_attention_backward_with_bias{_BACKWARD}, Tensor)")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, "
    "float? scale, bool enable_gqa) -> Tensor"
)
_numbers = itertools.count(1)
_CUDNN_CHOICE = SDPBackend.CUDNN_ATTENTION.value
# Older versions do not give zeros for a row whose bias is -inf everywhere.
_CUDNN_WITH_CLOSED_ROWS = 91000

# The size of a head must be a multiple of the first number. For the efficient kernel, rows of a
# bias must begin at a multiple of the second number, in elements. The kernel returns sums for a
# multiple of the third number of rows.
_SIZE_ALIGNMENT, _BIAS_ALIGNMENT, _SUMS_ALIGNMENT = 8, 8, 32


def fused_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool = False,
) -> str:
    """Return the fused kernel that PyTorch can run for attention on these tensors.

    The tensors have the shape (batch, heads, tokens, size). If ``enable_gqa``, key and value may
    have fewer heads than the query, each for a group of the query's heads. For the flash kernel
    alone, heads whose size is no multiple of 8 are padded with zeros, as by PyTorch.

    Returns:
        "cudnn" if PyTorch itself would choose cuDNN and a mask has booleans, otherwise "flash" or
        "efficient", or "" if no kernel fits, so that attention must be decomposed.
    """
    tensors = [query, key, value]
    if any(t.dim() != 4 or not t.numel() or t.dtype != query.dtype for t in tensors):
        return ""
    if query.shape[0] != key.shape[0] or query.shape[-1] != value.shape[-1]:
        return ""
    grouped = query.shape[1] != key.shape[1]
    if grouped and (not enable_gqa or query.shape[1] % key.shape[1]):
        return ""
    if key.shape[:3] != value.shape[:3]:
        return ""
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        return ""
    if not 0.0 <= dropout_p < 1.0:
        return ""
    backends, padded = torch.backends.cuda, query.shape[-1] % _SIZE_ALIGNMENT != 0
    with disable_current_modes(), DisablePythonDispatcher():
        q, k, v = (_real(t, _SIZE_ALIGNMENT) for t in tensors)
        bias = None if mask is None else _real(mask).expand(*q.shape[:3], k.shape[2])
        given = q, k, v, bias, dropout_p, is_causal
        by_cudnn = not padded and _is_mask_of_cudnn(mask)
        if by_cudnn and chosen_attention(*given, enable_gqa=grouped) == _CUDNN_CHOICE:
            return CUDNN
        params = backends.SDPAParams(*given, grouped)
        if query.dtype is not torch.float32 and backends.can_use_flash_attention(params):
            return FLASH
        if not (grouped or padded) and backends.can_use_efficient_attention(params):
            return EFFICIENT
    return ""


def _is_mask_of_cudnn(mask: torch.Tensor | None) -> bool:
    """Whether cuDNN's kernel is right for the mask.

    The kernel gives no gradient of a mask. It takes the least number of bfloat16 for -inf, and so
    gives zeros where softmax has the mean.
    """
    if mask is None:
        return True
    version = torch.backends.cudnn.version() or 0
    return mask.dtype is torch.bool and version >= _CUDNN_WITH_CLOSED_ROWS


def _real(tensor: torch.Tensor, alignment: int = 1) -> torch.Tensor:
    """Return a real, uninitialized tensor with a traced one's dtype, device, and shape.

    The last dimension is rounded up to a multiple of ``alignment``.
    """
    *shape, last = (int(n) for n in tensor.shape)
    shape.append(-(-last // alignment) * alignment)
    empty = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return empty.requires_grad_(tensor.requires_grad)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    kernel: str,
) -> torch.Tensor:
    """Compute attention by ``kernel`` for tensors of shape (batch, heads, tokens, size)."""
    bias = None if mask is None else _as_bias(mask, query)
    number = next(_numbers) if dropout_p else 0
    tensors = (_padded(t.transpose(1, 2)) for t in (query, key, value))
    result: torch.Tensor = torch.ops.tvmbridge.fused_attention(
        *tensors, bias, kernel, dropout_p, is_causal, scale, number
    )[0]
    return result[..., : value.shape[-1]].transpose(1, 2)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with zeros behind each head, to a size that the kernels take."""
    rest = -tensor.shape[-1] % _SIZE_ALIGNMENT
    return functional.pad(tensor, (0, rest)) if rest else tensor


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute attention without dropout and gradient, by the kernel that PyTorch chooses."""
    tensors = (t.transpose(1, 2) for t in (query, key, value))
    result: torch.Tensor = torch.ops.tvmbridge.attention(
        *tensors, mask, is_causal, scale, enable_gqa
    )
    return result.transpose(1, 2)


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    open_ = torch.zeros((), dtype=query.dtype, device=mask.device)
    return torch.where(mask, open_, float("-inf"))


def _spread(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Return the bias expanded to the shape of the scores, with rows aligned for the kernel."""
    if bias is None:
        return None
    scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    rest = -bias.shape[-1] % _BIAS_ALIGNMENT
    if bias.shape[-1] == key.shape[1] and rest:
        bias = functional.pad(bias, (0, rest))[..., : key.shape[1]]
    elif bias.shape[-1] == 1:
        spread = bias.expand(*bias.shape[:-1], key.shape[1])
        bias = functional.pad(spread, (0, -key.shape[1] % _BIAS_ALIGNMENT))[..., : key.shape[1]]
    return bias.expand(scores)


def _rows(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Return the bias with four dimensions, expanded except along the heads, as cuDNN takes it."""
    if bias is None:
        return None
    if bias.shape[-1] == 1:
        bias = bias.expand(*bias.shape[:-1], key.shape[1]).contiguous()
    bias = bias[(None,) * (4 - bias.dim())]
    return bias.expand(query.shape[0], -1, query.shape[1], key.shape[1])


def _bias_gradient(found: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a bias from the gradient ``found`` of the expanded bias."""
    return found.sum_to_size(bias.shape).contiguous()


def _inside(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: str,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    number: int,
) -> tuple[torch.Tensor, ...]:
    tensors = _inside(query, key, value)
    if kernel == FLASH:
        output, sums, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            *tensors, dropout_p, is_causal, False, scale=scale
        )
        seed, offset = seed.view(torch.int64), offset.view(torch.int64)
    elif kernel == CUDNN:
        output, sums, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            *tensors, _rows(bias, query, key), True, dropout_p, is_causal, False, scale=scale
        )
    else:
        spread = _spread(bias, query, key)
        output, sums, seed, offset = aten._scaled_dot_product_efficient_attention(
            *tensors, spread, True, dropout_p, is_causal, scale=scale
        )
    # Outside a CUDA graph capture, the efficient kernel returns its generator state on the CPU.
    device = query.device
    return output.transpose(1, 2).contiguous(), sums, seed.to(device), offset.to(device)


def _forward_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: str,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    batch, tokens, heads, _size = query.shape
    rows = -(-tokens // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
    sums = {FLASH: [tokens], CUDNN: [tokens, 1], EFFICIENT: [rows]}[kernel]
    return (
        query.new_empty([batch, tokens, heads, value.shape[-1]]),
        query.new_empty([batch, heads, *sums], dtype=torch.float32),
        query.new_empty([2] if kernel == FLASH else [], dtype=torch.int64),
        query.new_empty([], dtype=torch.int64),
    )


def _backward(
    gradient: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: str,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    number: int,
    *,
    learned_bias: bool = False,
) -> tuple[torch.Tensor, ...]:
    gradient, output, *tensors = _inside(gradient, output, query, key, value)
    if kernel == FLASH:
        lengths = query.shape[1], key.shape[1]
        state = seed.view(torch.uint64), offset.view(torch.uint64)
        found = aten._scaled_dot_product_flash_attention_backward(
            gradient, *tensors, output, sums, None, None, *lengths, dropout_p, is_causal, *state,
            scale=scale,
        )  # fmt: skip
    elif kernel == CUDNN:
        found = aten._scaled_dot_product_cudnn_attention_backward(
            gradient, *tensors, output, sums, seed, offset, _rows(bias, query, key), None, None,
            query.shape[1], key.shape[1], dropout_p, is_causal, scale=scale,
        )  # fmt: skip
    else:
        if dropout_p and not torch.cuda.is_current_stream_capturing():
            seed, offset = seed.cpu(), offset.cpu()
        spread = _spread(bias, query, key)
        found = aten._scaled_dot_product_efficient_attention_backward(
            gradient, *tensors, spread, output, sums, seed, offset, dropout_p,
            [True, True, True, learned_bias], is_causal, scale=scale,
        )  # fmt: skip
    results = [t.transpose(1, 2).contiguous() for t in found[:3]]
    if learned_bias:
        assert bias is not None
        results.append(_bias_gradient(found[3], bias))
    return tuple(results)


def _backward_fake(
    gradient: Any, output: Any, sums: Any, seed: Any, offset: Any, query: torch.Tensor,
    key: torch.Tensor, value: torch.Tensor, *_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def _backward_with_bias(*args: Any) -> tuple[torch.Tensor, ...]:
    return _backward(*args, learned_bias=True)


def _backward_with_bias_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in args[5:9])


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    q, k, v = _inside(query, key, value)
    result = functional.scaled_dot_product_attention(
        q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result.transpose(1, 2).contiguous()


def _attention_fake(query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty([*query.shape[:-1], value.shape[-1]])


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:4])
    ctx.settings = inputs[4:]


def _gradients(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    operators, learned_bias = torch.ops.tvmbridge, ctx.needs_input_grad[3]
    backward = (
        operators.fused_attention_backward_with_bias
        if learned_bias
        else operators.fused_attention_backward
    )
    found = backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return (*found, *[None] * (1 - learned_bias + len(ctx.settings)))


for _name, _run, _fake in (
    ("fused_attention", _forward, _forward_fake),
    ("fused_attention_backward", _backward, _backward_fake),
    ("fused_attention_backward_with_bias", _backward_with_bias, _backward_with_bias_fake),
    ("attention", _attention, _attention_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    f"{NAMESPACE}::fused_attention", _gradients, setup_context=_set_up, lib=_LIBRARY
)

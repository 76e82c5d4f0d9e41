"""Decompose operators that round values to a grid: fake quantisation, and quantised graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
Function = Callable[..., Any]
# The kernel for channels converts to int64: larger numbers become the least one, on x86.
_LARGEST_INT64 = 2.0**63 - 2.0**39


def _fake_quantized(
    x: torch.Tensor,
    scale: Any,
    zero_point: Any,
    quant_min: int,
    quant_max: int,
    *,
    largest: float = torch.inf,
) -> Any:
    """Return values rounded to a grid, and which of them are within its bounds."""
    if x.dtype is not torch.float32:
        return NotImplemented
    number = x * (1.0 / scale)
    if isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point():
        number = (number + zero_point).round()
    else:
        number = number.round() + zero_point
    # The kernels take the least number for NaN.
    number = torch.where(number.abs() <= largest, number, -torch.inf)
    inside = (number >= quant_min) & (number <= quant_max)
    return (number.clamp(quant_min, quant_max) - zero_point) * scale, inside


def _fake_quantized_by_channel(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Any:
    parts = partial(_fake_quantized, largest=_LARGEST_INT64)
    return _by_channel(parts)(x, scale, zero_point, axis, quant_min, quant_max)


def _quantized(
    x: torch.Tensor, scale: Any, zero: Any, least: int, most: int, dtype: torch.dtype
) -> Any:
    if x.dtype is not torch.float32:
        return NotImplemented
    return ((x * (1.0 / scale)).round() + zero).clamp(least, most).to(dtype)


def _dequantized(
    x: torch.Tensor, scale: Any, zero: Any, *_: Any, out_dtype: torch.dtype | None = None
) -> Any:
    if out_dtype not in (None, torch.float32):
        return NotImplemented
    return (x.to(torch.float32) - zero) * scale


def _by_channel(parts: Function) -> Function:
    def decompose(
        x: torch.Tensor, scales: torch.Tensor, zeros: Any, axis: int, *args: Any, **kwargs: Any
    ) -> Any:
        shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
        zero = 0 if zeros is None else zeros.view(shape)
        return parts(x, scales.view(shape), zero, *args, **kwargs)

    return decompose


def quantization() -> dict[Any, Function]:
    """Return decompositions of fake quantisation, and of quantised graphs if torch.ao has them."""
    namespace = torch.ops.quantized_decomposed
    found: dict[Any, Function] = {
        aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantized,
        aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantized_by_channel,
    }
    for name, parts in (("quantize", _quantized), ("dequantize", _dequantized)):
        if not hasattr(namespace, f"{name}_per_tensor"):
            continue
        whole = getattr(namespace, f"{name}_per_tensor")
        found |= {getattr(whole, overload): parts for overload in ("default", "tensor")}
        found[getattr(namespace, f"{name}_per_channel").default] = _by_channel(parts)
    return found

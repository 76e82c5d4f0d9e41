"""Decompose operators that PyTorch's kernels serve otherwise, for code that runs without PyTorch.

Each decomposition consists of operators that have loops, and equals the kernel up to rounding. A
decomposition returns NotImplemented for arguments that it does not support; the operator then stays
in the graph, and the export refuses it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tvmbridge.core.torch_private import get_decompositions
from tvmbridge.graph_capture.trace.framed import inverse_transform
from tvmbridge.graph_capture.trace.quantised import quantization

aten = torch.ops.aten
Function = Callable[..., Any]

_HALVES = (torch.float16, torch.bfloat16)
_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)
_MOST_FACTORS = 16


def alone_decompositions(table: Mapping[Any, Function]) -> dict[Any, Function]:
    """Return decompositions for code that runs without PyTorch.

    For arguments that they do not support, the result decomposes as ``table`` does.
    """
    whole = get_decompositions(_AS_PYTORCH)
    wide = {op: partial(_in_float32, op) for op in _OF_HALVES}
    parts: dict[Any, Function] = {**whole, **wide, **_PARTS, **_opaque_parts(), **quantization()}
    return {op: _or(function, table.get(op)) for op, function in parts.items()}


def _or(parts: Function, otherwise: Function | None) -> Function:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        found = parts(*args, **kwargs)
        if found is not NotImplemented or otherwise is None:
            return found
        return otherwise(*args, **kwargs)

    return decompose


def _in_float32(op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Pool values of half precision in float32, as the kernels do, and round the results."""
    if x.dtype not in _HALVES:
        return NotImplemented
    result = op(x.float(), *args, **kwargs)
    if isinstance(result, torch.Tensor):
        return result.to(x.dtype)
    return result[0].to(x.dtype), result[1]


def _extremum_of_all(op: Any, x: torch.Tensor) -> Any:
    if x.dtype is torch.bool:
        return x.any() if op is aten.amax.default else x.all()
    return op(x.reshape(-1), [0])


def _extremum(op: Any, x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Return the extremum of narrow integers along a dimension, and its places."""
    if x.dtype not in _NARROW or not x.dim():
        return NotImplemented
    value, place = op(x.to(torch.float64), dim, keepdim)
    return value.to(x.dtype), place


def _sum(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if x.dtype not in _NARROW or kwargs.get("dtype") not in (None, torch.int64):
        return NotImplemented
    return aten.sum.dim_IntList(x.to(torch.int64), dim, keepdim)


def _sum_of_all(x: torch.Tensor, **kwargs: Any) -> Any:
    return _sum(x, list(range(x.dim())), **kwargs)


def _quotient(a: torch.Tensor, b: Any, *, rounding_mode: str | None = None) -> Any:
    """Return a floor division of floats as the kernel computes it, from the exact remainder."""
    if rounding_mode != "floor" or not isinstance(b, torch.Tensor):
        return NotImplemented
    if {a.dtype, b.dtype} - {torch.float32, torch.float64}:
        return NotImplemented
    rest = aten.fmod.Tensor(a, b)
    whole = (a - rest) / b
    whole = torch.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
    floor = whole.floor()
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole == 0, torch.zeros_like(whole).copysign(a / b), floor)
    return torch.where(b == 0, a / b, floor)


def _power(x: torch.Tensor, exponent: Any) -> Any:
    """Return a small power of integers, by products that wrap around as the kernel's do."""
    is_whole = isinstance(exponent, int) and not isinstance(exponent, bool)
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool or not is_whole:
        return NotImplemented
    if not 0 < exponent <= _MOST_FACTORS:
        return NotImplemented
    result = x
    for _ in range(exponent - 1):
        result = result * x
    return result.clone() if result is x else result


def _rounded(x: torch.Tensor, *, decimals: int) -> Any:
    if not x.is_floating_point() or x.dtype in _HALVES:
        return NotImplemented
    scale = 10.0 ** abs(decimals)
    return (x * scale).round() / scale if decimals >= 0 else (x / scale).round() * scale


def _has_sign(x: torch.Tensor) -> Any:
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    return torch.ones_like(x).copysign(x) < 0


def _integer_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return aten.mm.default(x.to(torch.int32), y.to(torch.int32))


def _kth(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.dim() or x.dtype is torch.bool:
        return NotImplemented
    found = torch.sort(x, stable=True, dim=dim)
    pair = [part.select(dim, k - 1) for part in found]
    return tuple(part.unsqueeze(dim) if keepdim else part for part in pair)


def _median(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Return the lower median; if there are NaNs, the first of them."""
    if not x.dim() or not x.numel() or x.dtype is torch.bool:
        return NotImplemented
    value, place = _kth(x, (x.shape[dim] + 1) // 2, dim, True)
    if x.is_floating_point():
        missing = x.isnan()
        some = missing.any(dim, keepdim=True)
        value = torch.where(some, float("nan"), value)
        place = torch.where(some, missing.to(torch.int32).argmax(dim, keepdim=True), place)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _median_of_all(x: torch.Tensor) -> Any:
    found = _median(x.reshape(-1), 0)
    return found if found is NotImplemented else found[0].clone()


def _taken(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    flat: torch.Tensor = aten.index.Tensor(x.reshape(-1), [places.reshape(-1)])
    return flat.reshape(places.shape)


def _linear_1d(
    x: torch.Tensor, size: Sequence[int] | None, align: bool, scales: Sequence[float] | None
) -> torch.Tensor:
    size = None if size is None else [1, *size]
    scales = None if scales is None else [1.0, *scales]
    result: torch.Tensor = aten.upsample_bilinear2d.vec(x.unsqueeze(2), size, align, scales)
    return result.squeeze(2)


def _linear_3d(
    x: torch.Tensor, size: Sequence[int] | None, align: bool, scales: Sequence[float] | None
) -> torch.Tensor:
    """Interpolate height and width of each slice, then the depth."""
    flat = x.flatten(1, 2)
    inner = None if size is None else list(size[1:])
    factors = None if scales is None else list(scales[1:])
    flat = aten.upsample_bilinear2d.vec(flat, inner, align, factors)
    planes = flat.unflatten(1, x.shape[1:3]).flatten(3).transpose(2, 3)
    inner = None if size is None else [planes.shape[2], size[0]]
    factors = None if scales is None else [1.0, scales[0]]
    planes = aten.upsample_bilinear2d.vec(planes, inner, align, factors)
    return planes.transpose(2, 3).unflatten(3, flat.shape[2:])


def _scatter_reduced(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """Return sums and means, and other reductions as ones that keep the elements of ``x``."""
    if include_self and reduce in ("amax", "amin", "prod"):
        return NotImplemented
    if not x.dim() or x.dtype is torch.bool or (reduce == "mean" and not x.is_floating_point()):
        return NotImplemented
    src = src[tuple(slice(n) for n in index.shape)]
    wide = x.float() if x.dtype in _HALVES else x
    ones = torch.ones_like(src, dtype=wide.dtype)
    count = torch.zeros_like(wide).scatter_add(dim, index, ones)
    if not include_self:
        wide = torch.where(count > 0, _neutral(reduce, wide.dtype), wide)
    if reduce in ("amax", "amin", "prod"):
        reduced = aten.scatter_reduce.two(wide, dim, index, src.to(wide.dtype), reduce)
        return reduced.to(x.dtype)
    total = wide.scatter_add(dim, index, src.to(wide.dtype))
    if reduce == "mean":
        total = total / (count + 1 if include_self else count.clamp(min=1))
    return total.to(x.dtype)


def _neutral(reduce: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the value that a reduction of other values does not depend on."""
    if reduce in ("sum", "mean", "prod"):
        return torch.full((), int(reduce == "prod"), dtype=dtype)
    if dtype.is_floating_point:
        return torch.full((), -torch.inf if reduce == "amax" else torch.inf, dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.full((), limits.min if reduce == "amax" else limits.max, dtype=dtype)


def _one_hot(x: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the classes as rows; a number beyond them, for which PyTorch raises, is no class."""
    classes = torch.arange(num_classes, device=x.device)
    return (x.unsqueeze(-1) == classes).to(torch.int64)


def _opaque_parts() -> dict[Any, Function]:
    """Return the decompositions of operators that a trace keeps whole because of their checks."""
    bridge = torch.ops.tvmbridge
    return {bridge.one_hot.default: _one_hot, bridge.istft.default: inverse_transform}


# Operators that the frontend leaves to kernels, whose decompositions by PyTorch have loops.
_AS_PYTORCH = (
    aten.grid_sampler_2d.default,
    aten.upsample_bicubic2d.vec,
    aten.upsample_bicubic2d.default,
)
_OF_HALVES = (
    *(getattr(aten, f"max_pool{n}d_with_indices").default for n in (2, 3)),
    *(getattr(aten, f"adaptive_max_pool{n}d").default for n in (2, 3)),
    *(getattr(aten, f"avg_pool{n}d").default for n in (1, 2, 3)),
    *(getattr(aten, f"_adaptive_avg_pool{n}d").default for n in (2, 3)),
)
_PARTS: dict[Any, Function] = {
    aten.max.default: partial(_extremum_of_all, aten.amax.default),
    aten.min.default: partial(_extremum_of_all, aten.amin.default),
    aten.max.dim: partial(_extremum, aten.max.dim),
    aten.min.dim: partial(_extremum, aten.min.dim),
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum_of_all,
    aten.div.Tensor_mode: _quotient,
    aten.pow.Tensor_Scalar: _power,
    aten.round.decimals: _rounded,
    aten.signbit.default: _has_sign,
    aten._int_mm.default: _integer_product,
    aten.kthvalue.default: _kth,
    aten.median.dim: _median,
    aten.median.default: _median_of_all,
    aten.take.default: _taken,
    aten.scatter_reduce.two: _scatter_reduced,
    aten.upsample_linear1d.vec: _linear_1d,
    aten.upsample_trilinear3d.vec: _linear_3d,
}

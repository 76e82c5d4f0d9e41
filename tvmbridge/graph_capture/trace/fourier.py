"""Compute discrete Fourier transforms as matrix products, for code without PyTorch's kernels.

Complex tensors are real tensors here, whose last dimension has real and imaginary parts. A
transform of n numbers is one product with a matrix of cosines and sines. If n is large and has
factors a * b, two smaller transforms, of a and of b numbers, take its place (Cooley and Tukey).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

# Lengths up to here are one product: the terms of a sum in float32 are few, and matrices are small.
_DIRECT = 256
# The most numbers of a transform that has no factors.
_LARGEST_PRIME = 2048


def _matrix(rows: int, columns: int, period: int, sign: int, like: torch.Tensor) -> torch.Tensor:
    """Return ``exp(sign 2 pi i j / period)`` for row i and column j as pairs.

    Values are computed in float64, and converted to the dtype of ``like``. A real or imaginary part
    of 0 is exactly 0: the angle of a transformed value would change if it were only near 0.
    """
    i, j = (torch.arange(n, device=like.device) for n in (rows, columns))
    turns = torch.remainder(sign * i[:, None] * j, period)
    angles = turns.to(torch.float64) / period * (2 * math.pi)
    zero = torch.zeros_like(angles)
    quarters = torch.remainder(4 * turns, 2 * period)
    cosines = torch.where(quarters == period, zero, torch.cos(angles))
    sines = torch.where(quarters == 0, zero, torch.sin(angles))
    return torch.stack([cosines, sines], -1).to(like.dtype)


def _split(n: int) -> int | None:
    """Return the largest factor of ``n`` up to its root; None if the transform is one product."""
    factors = [a for a in range(2, math.isqrt(n) + 1) if n % a == 0]
    return max(factors) if n > _DIRECT and factors else None


def _is_supported(n: int) -> bool:
    a = _split(n)
    if a is None:
        return 0 < n <= _LARGEST_PRIME
    return _is_supported(a) and _is_supported(n // a)


def _transformed(x: torch.Tensor, sign: int, kept: int, real: bool) -> torch.Tensor:
    """Return the first ``kept`` numbers of the transform along the last dimension of numbers.

    Args:
        x: pairs, of shape (..., n, 2); numbers of shape (..., n) if ``real``.
        sign: the sign of the exponent.
        kept: how many results are computed.
        real: whether ``x`` has no imaginary parts.
    """
    n = x.shape[-1 if real else -2]
    a = _split(n)
    if a is None:
        return _by_product(x, sign, kept, real)
    b = n // a
    front = x.shape[: -1 if real else -2]
    inner = x.reshape(*front, a, b, *([] if real else [2]))
    inner = _transformed(inner.transpose(len(front), len(front) + 1), sign, a, real)
    turned = _times(inner, _matrix(b, a, n, sign, x))
    outer = _transformed(turned.transpose(-3, -2), sign, b, real=False)
    return outer.transpose(-3, -2).reshape(*front, n, 2)[..., :kept, :]


def _by_product(x: torch.Tensor, sign: int, kept: int, real: bool) -> torch.Tensor:
    n = x.shape[-1 if real else -2]
    front = x.shape[: -1 if real else -2]
    matrix = _matrix(n, kept, n, sign, x)
    if real:
        result = x.reshape(-1, n) @ matrix.reshape(n, 2 * kept)
    else:
        turned = torch.stack([-matrix[..., 1], matrix[..., 0]], -1)
        both = torch.stack([matrix, turned], 1).reshape(2 * n, 2 * kept)
        result = x.reshape(-1, 2 * n) @ both
    return result.reshape(*front, kept, 2)


def _times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (a, b), (c, d) = x.unbind(-1), y.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def _to_real(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return the n real numbers whose transform begins with the pairs ``x``."""
    m = n // 2 + 1
    x = x[..., :m, :]
    if _split(n) is not None:
        mirrored = torch.flip(x[..., 1 : n - m + 1, :], [-2])
        mirrored = torch.stack([mirrored[..., 0], -mirrored[..., 1]], -1)
        return _transformed(torch.cat([x, mirrored], -2), 1, n, real=False)[..., 0]
    matrix = _matrix(m, n, n, 1, x)
    place = torch.arange(m, device=x.device)
    # All but the first number, and the middle one, also stand for their conjugates.
    alone = (place == 0) | (place * 2 == n)
    factors = torch.where(alone, 1.0, 2.0).to(x.dtype)
    both = torch.stack([matrix[..., 0], -matrix[..., 1]], 1) * factors[:, None, None]
    return (x.reshape(-1, 2 * m) @ both.reshape(2 * m, n)).reshape(*x.shape[:-2], n)


def _scaled(x: torch.Tensor, sizes: Sequence[int], normalization: int) -> torch.Tensor:
    """Divide by the number of elements (2), by its root (1), or by nothing (0)."""
    count = math.prod(sizes)
    if not normalization:
        return x
    return x / (count if normalization == 2 else math.sqrt(count))


def _along(
    x: torch.Tensor, dim: int, last: int, function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply ``function`` with dimension ``dim`` moved to ``last``."""
    return torch.movedim(function(torch.movedim(x, dim, last)), last, dim)


def complex_to_complex(
    x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool
) -> torch.Tensor:
    """Compute ``aten._fft_c2c``."""
    pairs = torch.view_as_real(x)
    dims = [d % x.dim() for d in dim]
    if not all(_is_supported(x.shape[d]) for d in dims) or not x.numel():
        return NotImplemented
    for d in dims:
        n = x.shape[d]
        transformed = partial(_transformed, sign=-1 if forward else 1, kept=n, real=False)
        pairs = _along(pairs, d, -2, transformed)
    scaled = _scaled(pairs, [x.shape[d] for d in dims], normalization)
    return torch.view_as_complex(scaled.contiguous())


def real_to_complex(
    x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool
) -> torch.Tensor:
    """Compute ``aten._fft_r2c``."""
    dims = [d % x.dim() for d in dim]
    if not all(_is_supported(x.shape[d]) for d in dims) or not x.numel():
        return NotImplemented
    n = x.shape[dims[-1]]
    kept = n // 2 + 1 if onesided else n
    moved = torch.movedim(x, dims[-1], -1)
    pairs = torch.movedim(_transformed(moved, -1, kept, real=True), -2, dims[-1])
    pairs = _scaled(pairs, [x.shape[d] for d in dims], normalization)
    result = torch.view_as_complex(pairs.contiguous())
    return complex_to_complex(result, dims[:-1], 0, True) if dims[:-1] else result


def complex_to_real(
    x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> torch.Tensor:
    """Compute ``aten._fft_c2r``."""
    dims = [d % x.dim() for d in dim]
    sizes = [*(x.shape[d] for d in dims[:-1]), last_dim_size]
    if not all(map(_is_supported, sizes)) or not x.numel():
        return NotImplemented
    if dims[:-1]:
        x = complex_to_complex(x, dims[:-1], 0, False)
    pairs = torch.movedim(torch.view_as_real(x), dims[-1], -2)
    real = torch.movedim(_to_real(pairs, last_dim_size), -1, dims[-1])
    return _scaled(real, sizes, normalization)


FOURIER: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._fft_c2c.default: complex_to_complex,
    torch.ops.aten._fft_r2c.default: real_to_complex,
    torch.ops.aten._fft_c2r.default: complex_to_real,
}

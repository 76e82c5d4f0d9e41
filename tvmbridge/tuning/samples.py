"""Sample inputs on which two kernels must agree, and the tolerances of the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tvm import tirx

# Tolerances relative to the element, and to the largest element of the tensor. Sums in another
# order differ by a few rounding errors; a wrong index differs by the value itself.
_TOLERANCES = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (2e-2, 1e-2),
    torch.bfloat16: (4e-2, 2e-2),
}
# One special value per this many elements, so that most rows have none.
_SPARSE = 2048


def buffer_types(function: tirx.PrimFunc) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each parameter of ``function``.

    Raises:
        ValueError: a parameter is no tensor, has a dtype that PyTorch lacks, or a symbolic shape.
    """
    types = []
    for param in function.params:
        if not tirx.is_buffer_var(param):
            raise ValueError("a parameter is not a tensor")
        dtype = getattr(torch, str(param.dtype), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there are no tensors of {param.dtype}")
        if not all(isinstance(d, tirx.IntImm) for d in param.shape):
            raise ValueError("a shape is not constant")
        types.append((tuple(int(d) for d in param.shape), dtype))
    return types


def sample_inputs(
    types: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> list[list[torch.Tensor]]:
    """Return three lists of tensors: of both signs, positive, and with NaN, infinities and zeros.

    Integers may be indices into any tensor, so they are below the smallest dimension.
    """
    generator = torch.Generator().manual_seed(20)
    bound = min((d for shape, _ in types for d in shape), default=1)
    sets = []
    for kind in range(3):
        tensors = []
        for shape, dtype in types:
            if not dtype.is_floating_point:
                high = 2 if dtype is torch.bool else max(1, bound)
                tensor = torch.randint(0, high, shape, generator=generator)
            else:
                tensor = torch.randn(shape, generator=generator)
                tensor = tensor.abs() + 0.1 if kind == 1 else tensor
                tensor = _with_specials(tensor, generator) if kind == 2 else tensor
            tensors.append(tensor.to(dtype))
        sets.append(tensors)
    return sets


def _with_specials(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() < 8:
        return tensor
    for value in (math.nan, math.inf, -math.inf, 0.0, -0.0):
        count = max(1, flat.numel() // _SPARSE)
        flat[torch.randint(0, flat.numel(), (count,), generator=generator)] = value
    return tensor


def disagreement(result: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return how ``result`` differs from ``expected``; None if only within the tolerances."""
    relative, absolute = _TOLERANCES.get(expected.dtype, (0.0, 0.0))
    finite = expected[expected.isfinite()].double()
    scale = float(finite.abs().max()) if len(finite) else 0.0
    try:
        torch.testing.assert_close(
            result, expected, rtol=relative, atol=absolute * scale, equal_nan=True
        )
    except AssertionError as error:
        return str(error)
    return None

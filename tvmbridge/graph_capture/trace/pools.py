"""Trace ``max_pool1d`` with the strides of eager PyTorch's results, and for any size.

PyTorch's function makes a constant of a symbolic length: with symbols, the function for two
dimensions is traced instead. Without a gradient eager PyTorch has a kernel for one dimension, whose
results are contiguous. For fake tensors it calls the kernel for two dimensions instead, whose
results may follow their input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.torch_private import make_contiguous_strides_for
from tvmbridge.graph_capture.trace.function_table import Call, replaces

POOLS = (torch.max_pool1d, functional.max_pool1d)


@replaces(*POOLS)
def _pooled(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wide = _of_two_dimensions(*args, **kwargs)
    result = call(*args, **kwargs) if wide is None else wide
    return laid_as_in_eager(result, isinstance(result, torch.Tensor) and result.requires_grad)


def _of_two_dimensions(
    input: Any,
    kernel_size: Any = None,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return the result for images of one row, or None for a call that has no symbolic sizes."""
    if not isinstance(input, torch.Tensor) or input.dim() not in (2, 3):
        return None
    if not (sizes_vary() or any(isinstance(n, torch.SymInt) for n in input.shape)):
        return None
    single = [
        (each[0] if isinstance(each, tuple | list) and len(each) == 1 else each)
        for each in (kernel_size, stride or kernel_size, padding, dilation)
    ]
    if not all(type(each) is int for each in single):
        return None
    kernel, step, border, apart = ((n, own) for n, own in zip((1, 1, 0, 1), single, strict=True))
    pool: Any = functional.max_pool2d
    found = pool(input.unsqueeze(-2), kernel, step, border, apart, ceil_mode, return_indices)
    if return_indices:
        return tuple(each.squeeze(-2) for each in found)
    return found.squeeze(-2)


def laid_as_in_eager(result: Any, requires_grad: bool) -> Any:
    """Return what ``max_pool1d`` returned for fake tensors with the strides of eager PyTorch.

    With ``return_indices`` it is a tuple, which eager PyTorch computes as for fake tensors.
    """
    if not isinstance(result, torch.Tensor) or requires_grad or not result.is_cpu:
        return result
    if result.stride() == make_contiguous_strides_for(result.shape):
        return result
    # ``contiguous()`` would keep other strides of dimensions of one element.
    return result.clone(memory_format=torch.contiguous_format)

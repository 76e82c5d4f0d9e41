"""Give the results of ``max_pool1d`` the strides that eager PyTorch gives.

Without a gradient eager PyTorch has a kernel for one dimension, whose results are contiguous. For
fake tensors it calls the kernel for two dimensions instead, whose results may follow their input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tvmbridge.core.torch_private import make_contiguous_strides_for
from tvmbridge.graph_capture.trace.function_table import Call, replaces

POOLS = (torch.max_pool1d, functional.max_pool1d)


@replaces(*POOLS)
def _pooled(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = call(*args, **kwargs)
    return laid_as_in_eager(result, isinstance(result, torch.Tensor) and result.requires_grad)


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

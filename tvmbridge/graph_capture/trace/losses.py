"""Decompose losses into parts that TVM's Gradient differentiates as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NONE, _MEAN, _SUM = range(3)
_HALVES = (torch.float16, torch.bfloat16)


def nll_loss(parts: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition of ``nll_loss_forward``.

    It looks up the weight of a class by the target, as the kernel does. PyTorch's decomposition
    ``parts`` multiplies the whole input by the weights, so that an infinite weight makes gradients
    of other classes NaN. ``parts`` is still used for half precision and for empty input.
    """

    def decompose(
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
    ) -> Any:
        if x.dtype in _HALVES or not x.numel():
            return parts(x, target, weight, reduction, ignore_index)
        channel = 0 if x.dim() < 2 else 1
        ignored = target == ignore_index
        # classes[i] is i. The look-up raises IndexError for a bad target, as the kernel does.
        classes = torch.arange(x.shape[channel], device=x.device)
        place = classes.index_select(0, torch.where(ignored, 0, target).long().flatten())
        picked = x.gather(channel, place.view(target.shape).unsqueeze(channel)).squeeze(channel)
        each = torch.ones_like(picked)
        if weight is not None:
            each = weight.index_select(0, place).view(target.shape)
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        loss = torch.where(ignored, zero, -picked * each)
        if reduction == _NONE and x.dim() > 1:
            return loss, zero.clone()
        total = torch.where(ignored, zero, each).sum()
        if reduction == _NONE:
            return loss, total
        summed = loss.sum()
        return (summed / total if reduction == _MEAN else summed), total

    return decompose

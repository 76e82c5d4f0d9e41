"""Views: the view operators by which forward made an output, so that they can be replayed.

A view is made again by its strides and offset. Where elements of the base share memory (it was
expanded), these do not determine the view, and gradients would go to all; such a view is made
again by its operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import CreationMeta, TorchDispatchMode, creation_meta
from tvmbridge.core.types import ViewStep

aten = torch.ops.aten

# Views that autograd does not take for views of their base.
_OWN_HISTORY = {
    CreationMeta.IN_CUSTOM_FUNCTION,
    CreationMeta.INFERENCE_MODE,
    CreationMeta.NO_GRAD_MODE,
}


class ViewWatch(TorchDispatchMode):
    """Notes the view operators that run within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Results are kept alive, so that no other tensor gets the same id.
        self._made_by: dict[int, tuple[torch.Tensor, torch.Tensor, ViewStep]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func.is_view and args and isinstance(args[0], torch.Tensor):
            several = isinstance(results, tuple | list)
            for i, result in enumerate(results if several else [results]):
                step = ViewStep(func, tuple(args[1:]), dict(kwargs), i if several else None)
                self._made_by[id(result)] = (result, args[0], step)
        return results

    def steps(self, output: torch.Tensor, base: torch.Tensor) -> tuple[ViewStep, ...]:
        """How ``output`` was made from ``base``, which it shares memory with.

        Raises:
            UnsupportedOperatorError: by other operators than these, or in terms of memory.
        """
        steps: list[ViewStep] = []
        current = output
        while current is not base:
            found = self._made_by.get(id(current))
            if found is None or found[2].operator is aten.as_strided.default:
                raise UnsupportedOperatorError(
                    "an output is a view of a tensor whose elements share memory and that "
                    "requires a gradient"
                )
            _, current, step = found
            steps.append(step)
        return tuple(reversed(steps))

    def detaches(self, output: torch.Tensor) -> bool:
        """Whether ``output`` is a view by way of ``detach``."""
        found = self._made_by.get(id(output))
        while found is not None:
            _, base, step = found
            if step.operator is aten.detach.default:
                return True
            found = self._made_by.get(id(base))
        return False


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` may share memory with one another."""
    if tensor.is_contiguous():
        return False
    reached = 0
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, extent in dims:
        if extent > 1:
            if stride <= reached:
                return True
            reached += stride * (extent - 1)
    return False


def root(tensor: torch.Tensor) -> torch.Tensor:
    """The base of ``tensor`` in autograd (``_base``); itself where it is no view."""
    return tensor if tensor._base is None else tensor._base


def has_other_history(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether gradients do not flow from ``output`` to ``base`` as from a view of it."""
    if not output.requires_grad:
        return False
    metas = {creation_meta(t) for t in (output, base) if t._is_view()}
    return bool(metas & _OWN_HISTORY) or root(output) is not root(base)


def in_order_of_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its dimensions by decreasing stride; None where it does not fill its memory."""
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides; ``Tensor.clone`` fills gaps."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def viewed(base: torch.Tensor, steps: Sequence[ViewStep]) -> torch.Tensor:
    """The view of ``base`` by the operators ``steps``."""
    for step in steps:
        result = step.operator(base, *step.args, **step.kwargs)
        base = result if step.index is None else result[step.index]
    return base

"""Views: record the view operators that create outputs, so that they can be replayed.

Usually a view is recreated by its strides and offset. If the base is expanded, several of its
elements share memory. Strides and offset then do not say which of them the view has, and a
gradient would go to all of them. Such a view is recreated by its operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import CreationMeta, TorchDispatchMode, creation_meta
from tvmbridge.core.types import ViewStep

aten = torch.ops.aten

# Creation metas of views that autograd does not treat as ordinary views of their base.
_OWN_HISTORY = {
    CreationMeta.IN_CUSTOM_FUNCTION,
    CreationMeta.INFERENCE_MODE,
    CreationMeta.NO_GRAD_MODE,
}


class ViewWatch(TorchDispatchMode):
    """Record the view operators that run in this mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By id of a result: the result, its base and the operator. The result is kept alive, so
        # that no other tensor gets its id.
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
        """Return the view operators that created ``output`` from ``base``, in order.

        Raises:
            UnsupportedOperatorError: ``output`` was created by an unrecorded operator or by
                ``as_strided``.
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
        """Whether ``detach`` is among the recorded operators that created ``output``."""
        found = self._made_by.get(id(output))
        while found is not None:
            _, base, step = found
            if step.operator is aten.detach.default:
                return True
            found = self._made_by.get(id(base))
        return False


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` may share memory with one another, as after ``expand``."""
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
    """Return the base of ``tensor`` in autograd (``_base``), or ``tensor`` if it is no view."""
    return tensor if tensor._base is None else tensor._base


def has_other_history(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether ``output`` requires a gradient, but autograd does not treat it as a view of ``base``.

    This is the case for views created under no_grad, in inference mode or by custom functions, and
    for outputs with another base in autograd.
    """
    if not output.requires_grad:
        return False
    metas = {creation_meta(t) for t in (output, base) if t._is_view()}
    return bool(metas & _OWN_HISTORY) or root(output) is not root(base)


def in_order_of_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions by decreasing stride; None if the tensor has gaps or overlaps."""
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a copy with these strides, including gaps, which ``Tensor.clone`` would close."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def viewed(base: torch.Tensor, steps: Sequence[ViewStep]) -> torch.Tensor:
    """Return the view of ``base`` that the operators ``steps`` create."""
    for step in steps:
        result = step.operator(base, *step.args, **step.kwargs)
        base = result if step.index is None else result[step.index]
    return base

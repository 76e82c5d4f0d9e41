"""Intermediate view bases: tensors that several outputs are views of, but that are not returned.

In ``return y[:2], y[1:]`` both outputs alias ``y``, so a mutation of one is seen in the other.
Compiled code computes ``y`` as an additional output, and the outputs are recreated as views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tvmbridge.calls.views import in_order_of_memory, root
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import disable_current_modes, pytree
from tvmbridge.core.types import IntermediateBase

_LARGEST_COMPARED = 1 << 22


class WithBases:
    """Wrap a forward to return ``(results, bases)``, or only ``results`` if there are no bases.

    Args:
        forward: the function to call.
        bases: the intermediate view bases to return, each described by an output that is its view.
    """

    def __init__(self, forward: Callable[..., Any], bases: Sequence[IntermediateBase]) -> None:
        self._forward = forward
        self._bases = bases

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._bases:
            return self._forward(*args, **kwargs)
        with _Made() as made:
            results = self._forward(*args, **kwargs)
        leaves = pytree.tree_leaves(results)
        return results, tuple(made.base(leaves[b.output], b.order) for b in self._bases)


class _Made(TorchFunctionMode):
    """A function mode that keeps all tensors that PyTorch's functions return.

    Some functions return a view of an internal tensor, for example ``linear`` with a 3-d input. A
    trace has the view, but not the internal base, so the base must be recreated from the view.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        several = results if type(results) in (tuple, list) else (results,)
        self._tensors += [r for r in several if issubclass(type(r), torch.Tensor)]
        return results

    def base(self, output: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """Return the base of ``output`` as a contiguous view of a tensor that a function returned.

        Args:
            order: the dimensions of the base, from the outermost to the innermost in memory.

        Raises:
            UnsupportedOperatorError: no function returned a tensor with all elements of the base.
        """
        base = root(output)  # A trace may not know it, so no operator may be called on it.
        shape = [base.shape[dim] for dim in order]
        for made in self._tensors:
            if root(made) is base and made.numel() == base.numel() and made.dtype == base.dtype:
                by_memory = in_order_of_memory(made)
                if by_memory is not None:
                    return made.permute(by_memory).view(shape)
        raise UnsupportedOperatorError(
            "an output is a view of a tensor that no function of forward has returned as a whole"
        )


def bases_of(leaves: Sequence[Any], bases: Sequence[IntermediateBase]) -> tuple[torch.Tensor, ...]:
    """Return the intermediate view bases of ``leaves``, permuted so that they are contiguous."""
    return tuple(root(leaves[base.output]).permute(base.order) for base in bases)


def intermediate_base(
    members: Sequence[int], returned: Sequence[int], outputs: Sequence[torch.Tensor]
) -> IntermediateBase | None:
    """Return an intermediate base that covers all members; None if there is none.

    Args:
        returned: the members whose autograd base may serve as the intermediate base.
    """
    needs_grad = any(outputs[n].requires_grad for n in members)
    for number in returned:
        base = root(outputs[number])
        order = in_order_of_memory(base)
        if order is None or base.dtype != outputs[number].dtype or base.is_conj() or base.is_neg():
            continue
        if base.requires_grad == needs_grad and all(covers(base, outputs[n]) for n in members):
            return IntermediateBase(number, order)
    return None


def covers(base: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the memory span of ``tensor`` is within the span of ``base`` in their storage."""
    (begin, end), (first, last) = _span(base), _span(tensor)
    return begin <= first and last <= end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte behind its last one."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    begin = int(tensor.storage_offset())
    end = begin + 1 + sum((n - 1) * s for n, s in dims)
    return begin * tensor.element_size(), end * tensor.element_size()


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any two tensors that have one storage share an element.

    Return True without a comparison of elements for large storages or several dtypes.
    """
    if len(tensors) < 2:
        return False
    spans = sorted(map(_span, tensors))
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return False
    size = max(end for _, end in spans) // tensors[0].element_size()
    if size > _LARGEST_COMPARED or len({t.dtype for t in tensors}) > 1:
        return True
    with disable_current_modes():
        used = torch.zeros(size, dtype=torch.bool)
        for tensor in tensors:
            mine = used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if bool(mine.any()):
                return True
            mine.fill_(True)
    return False

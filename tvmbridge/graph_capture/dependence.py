"""Find calls whose results have a data-dependent shape or Python value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.writes import version_of

_NAMES = (
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    *("equal", "allclose", "item", "tolist"),
)
_DEPENDENT = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.functional, torch.Tensor)
    for name in _NAMES
    if hasattr(owner, name)
)
_BY_TENSOR: Mapping[Any, int] = {
    getattr(owner, name): place
    for owner in (torch, torch.Tensor)
    for name, place in (("narrow", 2), ("tensor_split", 1), ("repeat_interleave", 1))
}

# Classes of PyTorch's errors, known by their names: some are imported with TorchDynamo alone.
_STOPS = frozenset(
    {
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
        "PendingUnbackedSymbolNotFound",
    }
)

BRANCHES = "use torch.where in place of the branch, or decide outside of the module"
AS_NUMBER = "keep it as a tensor, or pass the number as an argument of forward"


class DependenceError(CaptureError):
    """Forward uses a data-dependent value in a way that the eager epilogue cannot repeat.

    Args:
        what: the rest of a sentence that begins with "forward", for the message.
        advice: what the user can do about it.
        in_parts: forward can be compiled in parts, between which PyTorch computes the value.
    """

    def __init__(self, what: str, advice: str = "", *, in_parts: bool = True) -> None:
        super().__init__(f"forward {what}")
        self.advice = advice
        self.in_parts = in_parts

    def at(self, line: str | None) -> str:
        """Return the message with the ``line`` of forward, if it is known, and the advice."""
        place = "" if line is None else f", at {line}"
        return f"{self}{place}" + (f"; {self.advice}" if self.advice else "")


def depends_on_values(error: BaseException) -> bool:
    """Whether PyTorch's trace stopped because a size or a decision depends on data."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ in _STOPS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def is_known(arguments: Any) -> bool:
    """Whether all tensors in ``arguments`` are fake tensors that carry a constant value."""
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return all(getattr(t, "constant", None) is not None for t in tensors)


class Ranges:
    """The known elements of integer ranges (``torch.arange``) and of their ``unbind`` results.

    A fake tensor carries no values, although Python numbers alone determine a range.
    """

    def __init__(self) -> None:
        # By id. The tensor is held, so that no other tensor gets its id.
        self._made: dict[int, tuple[torch.Tensor, int, range]] = {}

    def learn(self, result: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the ranges in the ``result`` of a call."""
        if func is torch.arange and _makes_integers(args, kwargs):
            self._note(result, range(*args))
        # In a trace, ``Tensor.tolist`` unbinds the tensor and calls ``item`` on each element.
        elif func is torch.Tensor.unbind and self._numbers(args) is not None:
            for each, number in zip(result, self._numbers(args) or (), strict=True):
                self._note(each, range(number, number + 1))

    def number(self, func: Any, args: Sequence[Any]) -> int | None:
        """Return what ``item()`` returns for a known range of one element; otherwise None."""
        numbers = self._numbers(args) if func is torch.Tensor.item else None
        return numbers[0] if numbers is not None and len(numbers) == 1 else None

    def _note(self, tensor: torch.Tensor, numbers: range) -> None:
        self._made[id(tensor)] = tensor, version_of(tensor), numbers

    def _numbers(self, args: Sequence[Any]) -> range | None:
        """Return the range in the first argument; None if it is unknown or was mutated."""
        tensor, version, numbers = self._made.get(id(args[0]), (None, 0, range(0)))
        return None if tensor is None or version_of(tensor) != version else numbers


def _makes_integers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    numbers = 1 <= len(args) <= 3 and all(type(a) is int for a in args)
    whole = kwargs.get("dtype") in (None, torch.int64)
    return numbers and whole and kwargs.keys() <= {"dtype", "device"}


def depends_on_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call returns a data-dependent shape, or a tensor's value, as ``item()`` does."""
    if func in _DEPENDENT:
        return True
    if func is torch.where:
        return len(args) + len(kwargs) == 1
    if func is functional.one_hot:
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return bool(classes == -1)
    if func is torch.Tensor.__getitem__:
        return any(map(_reads_values, args[1] if type(args[1]) is tuple else (args[1],)))
    place = _BY_TENSOR.get(func)
    if place is None or kwargs.get("output_size") is not None:
        return False
    names = ("start", "repeats", "tensor_indices_or_sections", "indices_or_sections")
    given = [*args[place : place + 1], *(kwargs[n] for n in names if n in kwargs)]
    alone = func is torch.repeat_interleave and len(args) == 1 and not given
    return alone or any(isinstance(g, torch.Tensor) for g in given)


def _reads_values(index: Any) -> bool:
    """Whether indexing by ``index`` reads values: a mask, or a 0-d tensor, which becomes an int."""
    if isinstance(index, slice):
        return not is_known((index.start, index.stop, index.step))
    if not isinstance(index, torch.Tensor):
        return False
    return index.dtype in (torch.bool, torch.uint8) or (index.dim() == 0 and not is_known(index))

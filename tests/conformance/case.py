"""A case is one call of an operator; its variants have harder values, strides and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

_SPECIAL_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-6, -1e-6, 100.0, -100.0)

# For each dtype, dtypes for the second operand: one of another width, one of another kind.
_PROMOTED = {
    torch.float32: (torch.float64, torch.int64),
    torch.float64: (torch.float32, torch.bool),
    torch.float16: (torch.float32, torch.bfloat16),
    torch.bfloat16: (torch.float32, torch.int32),
    torch.int64: (torch.int32, torch.float32),
    torch.int32: (torch.uint8, torch.float16),
    torch.bool: (torch.int64, torch.float32),
    torch.uint8: (torch.int8, torch.float32),
    torch.int8: (torch.uint8, torch.bool),
    torch.int16: (torch.int64, torch.float64),
}


@dataclass(frozen=True)
class Case:
    """One call of an operator; the tensors among its arguments become inputs of a module.

    - ``label``: the number of the OpInfo sample, and the kind of variant.
    - ``leaves``: the flattened arguments.
    - ``spec``: the tree spec that unflattens them to ``(args, kwargs)``.
    - ``requires``: for each tensor, whether it requires a gradient.
    """

    label: str
    leaves: tuple[Any, ...]
    spec: Any
    requires: tuple[bool, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def ordinary(self) -> bool:
        """Whether no tensor of the case is empty."""
        return all(t.numel() for t in self.tensors)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with the case's own tensors replaced by ``tensors``."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def case_of(label: str, sample: Any) -> Case:
    """Return the case of an OpInfo sample."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Case(label, tuple(detached), spec, tuple(t.requires_grad for t in tensors))


def variants(case: Case, special: str | None) -> Iterator[Case]:
    """Yield variants of ``case`` with special values, strides, shapes and dtypes.

    An operator may not accept every variant; the caller asks eager PyTorch. ``special`` selects
    the special values: ``all``, ``finite`` (which includes NaN), or None for no such variant.
    """
    if special is not None:
        yield from _changed(case, "special", _special_values(special == "finite"))
    yield from _changed(case, "expanded", _expanded)
    yield from _changed(case, "empty", lambda t, _: t[:0] if t.dim() else None)
    yield from _changed(case, "scalar", lambda t, _: t.reshape(-1)[0] if t.numel() else None)
    shapes = [t.shape for t in case.tensors[:2]]
    if len(set(shapes)) < len(shapes):
        # The kernels of other operators do not check the second operand's size.
        yield from _changed(case, "broadcast", _broadcast)
    dtypes = [t.dtype for t in case.tensors]
    if len(dtypes) > 1 and dtypes[0] == dtypes[1]:
        for wanted in _PROMOTED.get(dtypes[0], ()):
            name = str(wanted).removeprefix("torch.")
            yield from _changed(case, f"with {name}", _promoted(wanted))


Change = Callable[[torch.Tensor, int], torch.Tensor | None]


def _changed(case: Case, what: str, change: Change) -> Iterator[Case]:
    """Yield the case with ``change`` applied to each of its tensors, if that changes any."""
    leaves, requires = list(case.leaves), []
    position, different = 0, False
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        after = change(leaf, position)
        if after is not None:
            leaves[index], different = after, True
        wide = leaves[index].is_floating_point() or leaves[index].is_complex()
        requires.append(case.requires[position] and wide)
        position += 1
    if different:
        yield replace(
            case, label=f"{case.label} {what}", leaves=tuple(leaves), requires=tuple(requires)
        )


def _special_values(finite: bool) -> Change:
    """Return a change that writes NaN, infinities, zeros and extreme numbers into float tensors."""
    numbers = [n for n in _SPECIAL_FLOATS if not finite or abs(n) != float("inf")]

    def change(tensor: torch.Tensor, position: int) -> torch.Tensor | None:
        if not tensor.is_floating_point() or not tensor.numel():
            return None
        values = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
        for i, number in enumerate(numbers):
            values[(i * 2 + 5 * position) % values.numel()] = number
        return values.reshape(tensor.shape)

    return change


def _expanded(tensor: torch.Tensor, position: int) -> torch.Tensor | None:
    """Return the first operand with its first row for all rows, by a stride of 0; else None."""
    if position or not tensor.dim() or tensor.shape[0] < 2:
        return None
    return tensor[:1].expand_as(tensor)


def _broadcast(tensor: torch.Tensor, position: int) -> torch.Tensor | None:
    """Return the first column of the second operand; None for other operands."""
    return tensor[..., :1] if position == 1 and tensor.dim() and tensor.shape[-1] > 1 else None


def _promoted(dtype: torch.dtype) -> Change:
    return lambda tensor, position: tensor.to(dtype) if position == 1 else None

"""Compare the results of an exported file with eager PyTorch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from tvmbridge.core.errors import ExportError
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.structure import opened
from tvmbridge.core.torch_private import pytree
from tvmbridge.exporting.runtime import runtime
from tvmbridge.graph_capture.capture import normalize_sample

# The error may be 8 times eager's own, or 64 units in the last place of the largest element.
_TIMES, _ROUNDINGS = 8.0, 64.0


@dataclass(frozen=True)
class OutputComparison:
    """The comparison of one output with eager PyTorch.

    - ``number``: the position of the output among the tensors that forward returns.
    - ``error``, ``eager_error``: the largest difference from float64, of the file and of eager
      PyTorch.
    - ``roundings``: ``error`` in units in the last place of the largest element.
    - ``ok``: whether rounding explains the error.
    """

    number: int
    error: float
    eager_error: float
    roundings: float
    ok: bool


@dataclass(frozen=True)
class ExportComparison:
    """The comparison of an exported file with its module in eager PyTorch.

    - ``outputs``: one comparison for each tensor that forward returns.
    """

    outputs: Sequence[OutputComparison]

    @property
    def ok(self) -> bool:
        """Whether rounding explains all differences."""
        return all(output.ok for output in self.outputs)

    def __str__(self) -> str:
        lines = ["output  error      eager's error  roundings"]
        for o in self.outputs:
            verdict = "" if o.ok else "  differs"
            lines.append(
                f"{o.number:6}  {o.error:.3e}  {o.eager_error:.3e}      {o.roundings:.1f}{verdict}"
            )
        return "\n".join(lines)


def compare_export(
    module: nn.Module,
    sample: Any,
    path: str | os.PathLike[str],
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
) -> ExportComparison:
    """Run an exported file on ``sample`` and compare it with eager PyTorch and with float64.

    Args:
        module: the module that was exported, in eval mode.
        sample: a tensor, or a tuple of positional arguments.
        path: the file.
        sample_kwargs: keyword arguments of forward.

    Returns:
        The comparison; ``ok`` is True if rounding explains all differences. A module that does
        not run in float64 is compared with its results in eager PyTorch alone.

    Raises:
        ExportError: ``tvmbridge_runtime`` is not installed, or the structures differ.
    """
    load = runtime().load
    register_containers(module)
    args, kwargs = normalize_sample(sample, sample_kwargs)
    with torch.no_grad():
        eager = _tensors(copy.deepcopy(module)(*args, **kwargs))
        try:
            exact = _exact(module, args, kwargs)
        except Exception:  # a forward may refuse float64 by any error
            exact = eager
    inputs = [_array(t) for t in _tensors((args, kwargs))]
    found = _leaves(load(path)(*inputs))
    if len(found) != len(eager):
        raise ExportError(f"the file returns {len(found)} tensors, and forward {len(eager)}")
    compared = zip(found, eager, exact, strict=True)
    return ExportComparison([_compared(n, *each) for n, each in enumerate(compared)])


def _exact(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the outputs of the module in float64."""

    def wide(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    args, kwargs = pytree.tree_map(wide, (args, kwargs))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _tensors(copy.deepcopy(module).double()(*args, **kwargs))
    finally:
        torch.set_default_dtype(before)


def _tensors(structure: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(opened(structure))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    return tensor if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _leaves(structure: Any) -> list[torch.Tensor]:
    """Return the tensors among the runtime's results, in order."""
    if isinstance(structure, Mapping):
        return [t for value in structure.values() for t in _leaves(value)]
    if isinstance(structure, list | tuple):
        return [t for value in structure for t in _leaves(value)]
    if isinstance(structure, numpy.ndarray | numpy.generic):
        return [torch.from_numpy(numpy.asarray(structure))]
    return [from_dlpack(structure)] if hasattr(structure, "__dlpack__") else []


def _compared(
    number: int, found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor
) -> OutputComparison:
    if found.shape != eager.shape or found.dtype != eager.dtype:
        return OutputComparison(number, float("inf"), 0.0, float("inf"), False)
    if not eager.is_floating_point():
        same = bool(torch.equal(found, eager))
        return OutputComparison(number, 0.0 if same else float("inf"), 0.0, 0.0, same)
    exact = exact.double()
    errors = [_largest(t.double(), exact) for t in (found, eager)]
    finite = exact[exact.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    unit = torch.finfo(eager.dtype).eps * largest or torch.finfo(eager.dtype).tiny
    ok = errors[0] <= max(_TIMES * errors[1], _ROUNDINGS * unit)
    return OutputComparison(number, errors[0], errors[1], errors[0] / unit, ok)


def _largest(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference; infinite if only one value is finite, or if NaNs differ."""
    if not found.numel():
        return 0.0
    same = (found == exact) | (found.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, (found - exact).abs())
    return float(difference.nan_to_num(nan=float("inf")).max())

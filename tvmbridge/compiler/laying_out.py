"""Memory layouts: compiled functions take and return tensors in eager PyTorch's memory order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import tvm

from tvmbridge.calls.layouts import Layout, Strides
from tvmbridge.calls.views import laid_out
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.types import PassRecord
from tvmbridge.passes.relax.lay_out import Permuted
from tvmbridge.passes.relax.return_padded import padded_results
from tvmbridge.pipeline import layout_passes, run_passes


@dataclass(frozen=True)
class Layouts:
    """Memory layouts, by number, of the results that eager PyTorch does not return contiguous.

    - ``outputs``: the layouts of forward's outputs.
    - ``gradients``: the layouts of the gradients.
    - ``padded``: outputs with padded rows, which are contiguous in eager PyTorch: the shape without
      the padding, and the strides in the tensor that compiled code returns.
    """

    outputs: Mapping[int, Layout]
    gradients: Mapping[int, Layout]
    padded: Mapping[int, Layout] = field(default_factory=dict)

    def with_padded(self, function: tvm.relax.Function) -> Layouts:
        """Return these layouts with the padded results of ``function``."""
        padded = {}
        for number, (shape, pitch) in padded_results(function).items():
            extents = [*shape[1:-1], pitch]
            strides = [math.prod(extents[place:]) for place in range(len(extents))]
            order = tuple(range(len(shape)))
            padded[number] = Layout(shape, (*strides, 1), order)
        return replace(self, padded=padded) if padded else self

    def cut(self, results: list[torch.Tensor]) -> None:
        """Replace padded results by views of them without the padding."""
        for number, layout in self.padded.items():
            results[number] = results[number].as_strided(layout.shape, layout.stride)


def put_on(
    layouts: Mapping[int, Layout], results: list[torch.Tensor], strides: Strides = None
) -> None:
    """Change ``results`` in place so that they have the strides of eager PyTorch.

    Args:
        strides: other strides by number; such a result is replaced by a copy.
    """
    for number, layout in layouts.items():
        layout.put_on(results[number])
    for number, stride in (strides or {}).items():
        results[number] = laid_out(results[number], stride)


def put_on_some(
    layouts: Mapping[int, Layout], numbers: Sequence[int], results: Sequence[torch.Tensor]
) -> None:
    """Do the same to the first ``results`` of a function, which have these ``numbers``."""
    for number, result in zip(numbers, results, strict=False):
        if number in layouts:
            layouts[number].put_on(result)


def lay_out_functions(
    mod: tvm.IRModule,
    parts: SplitModule | None,
    layouts: Layouts,
    records: list[PassRecord],
) -> tuple[tvm.IRModule, SplitModule | None]:
    """Return the functions with results in the memory order of eager PyTorch.

    Backward takes the outputs that it reads in that order too. It takes each cotangent in the order
    of its output, which is the most common order of cotangents.
    """
    moved = _moved(layouts.outputs)
    mod = run_passes(mod, layout_passes("forward", list(moved.values()), ()), records)
    if parts is None:
        return mod, None
    first = len(parts.reads)
    taken = {i: n for i, (n, _) in enumerate(parts.kept_outputs, start=first)}
    first = len(mod["backward"].params) - len(parts.cotangent_of)
    taken |= dict(enumerate(parts.cotangent_of, start=first))
    parameters = [replace(moved[n], number=i) for i, n in taken.items() if n in moved]
    gradients = list(_moved(layouts.gradients).values())
    mod = run_passes(mod, layout_passes("backward", gradients, parameters), records)
    return mod, replace(parts, mod=mod)


def _moved(layouts: Mapping[int, Layout]) -> dict[int, Permuted]:
    return {n: Permuted(n, v.order, v.shape) for n, v in layouts.items() if v.moves}

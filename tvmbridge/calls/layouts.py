"""Layouts: reproduce the strides that outputs have in eager PyTorch.

Compiled code returns contiguous tensors. In eager PyTorch the convolution of a ``channels_last``
tensor returns a ``channels_last`` tensor, and ``y.transpose(1, 2)`` has the memory of ``y``. For
such an output compiled code returns a contiguous tensor with permuted dimensions. The output is a
view of it with eager's shape and strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tvmbridge.calls.views import shares_elements
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.torch_private import make_contiguous_strides_for
from tvmbridge.core.types import OutputKind

# Strides of the computed outputs of one call, by output number; None: the outputs keep their own.
Strides: TypeAlias = Mapping[int, tuple[int, ...]] | None


@dataclass(frozen=True)
class Layout:
    """The shape and strides of an output that is not contiguous.

    - ``shape``, ``stride``: the output's shape and strides in eager PyTorch.
    - ``order``: the dimensions from the outermost to the innermost in memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout | None:
        """Return the layout of a dense tensor; None if the tensor is contiguous."""
        if stride == make_contiguous_strides_for(shape):
            return None
        order = _order(shape, stride)
        moved = [d for d in order if shape[d] > 1]
        # The position of a dimension of extent 1 is arbitrary, and so is the order of dimensions
        # of a tensor without elements.
        in_place = moved == sorted(moved) or 0 in shape
        return cls(shape, stride, tuple(range(len(order))) if in_place else order)

    @property
    def moves(self) -> bool:
        """Whether the elements have another order in memory than in a contiguous tensor."""
        return self.order != tuple(range(len(self.order)))

    def put_on(self, tensor: torch.Tensor) -> None:
        """Set shape and strides of ``tensor`` in place."""
        tensor.as_strided_(self.shape, self.stride)


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout for a dense tensor with the strides of ``tensor``; None if contiguous."""
    stride = dense_strides(tensor)
    return None if stride is None else Layout.of(tuple(tensor.shape), stride)


def output_layouts(captured: CapturedGraph) -> dict[int, Layout]:
    """Return the layouts of the computed outputs that are not contiguous, by output number.

    Outputs that are written into existing state are left out: the state keeps its strides.
    """
    found: dict[int, Layout] = {}
    for number, output in enumerate(o for o in captured.outputs if o.is_computed):
        given = output.kind is OutputKind.USER or output.rebinds
        if given and output.spec is not None:
            layout = Layout.of(output.spec.shape, output.spec.stride)
            if layout is not None:
                found[number] = layout
    return found


def dense_strides(tensor: Any) -> tuple[int, ...] | None:
    """Return the strides of ``tensor`` without gaps, with its dimensions in the same order.

    Return None if elements may share memory, a stride is unknown, or ``tensor`` is no tensor.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not all(isinstance(n, int) for n in (*shape, *stride)):
        return None
    order = _order(shape, stride)
    if tensor.permute(order).is_contiguous():
        return stride
    if shares_elements(tensor):
        return None
    packed = make_contiguous_strides_for([shape[d] for d in order])
    return tuple(packed[order.index(d)] for d in range(len(shape)))


def _order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions by decreasing stride; equal strides keep their order."""
    return tuple(sorted(range(len(shape)), key=lambda d: stride[d], reverse=True))

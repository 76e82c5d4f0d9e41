"""Layouts: the strides of outputs.

Compiled code returns contiguous tensors. In eager PyTorch a convolution of a ``channels_last``
tensor is ``channels_last`` again, and ``y.transpose(1, 2)`` has the memory of ``y``. For such an
output compiled code returns the permuted, contiguous tensor, and the output is a view of that with
eager's shape and strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.torch_private import make_contiguous_strides_for
from tvmbridge.core.types import OutputKind
from tvmbridge.graph_capture.memory.views import shares_elements

# Of the computed outputs of one call, by number; None: as they are.
Strides: TypeAlias = Mapping[int, tuple[int, ...]] | None


@dataclass(frozen=True)
class Layout:
    """The shape and the strides of an output, and how its elements lie in memory.

    ``order`` are its dimensions from the outermost to the innermost in memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout | None:
        """The layout of a dense tensor; None where it is the one that compiled code gives."""
        if stride == make_contiguous_strides_for(shape):
            return None
        order = _order(shape, stride)
        moved = [d for d in order if shape[d] > 1]
        # Dimensions of extent 1 lie anywhere, and so does what has no elements.
        in_place = moved == sorted(moved) or 0 in shape
        return cls(shape, stride, tuple(range(len(order))) if in_place else order)

    @property
    def moves(self) -> bool:
        """Whether the elements lie in another order than in a contiguous tensor."""
        return self.order != tuple(range(len(self.order)))

    def put_on(self, tensor: torch.Tensor) -> None:
        """Give a fresh, contiguous tensor, whose dimensions stand in ``order``, this layout."""
        tensor.as_strided_(self.shape, self.stride)


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """The layout of a tensor like this one; None where it is contiguous."""
    stride = dense_strides(tensor)
    return None if stride is None else Layout.of(tuple(tensor.shape), stride)


def output_layouts(captured: CapturedGraph) -> dict[int, Layout]:
    """The layouts of the computed results that do not lie as compiled code gives them, by number.

    State that is written is not among them: it keeps its own.
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
    """The strides of ``tensor``, or, where it leaves gaps, of one without in the same order.

    None where elements share memory, strides are not known, or it is no tensor.
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
    """The dimensions from the outermost to the innermost; those of equal strides as they stand."""
    return tuple(sorted(range(len(shape)), key=lambda d: stride[d], reverse=True))

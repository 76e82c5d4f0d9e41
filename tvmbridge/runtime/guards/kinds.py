"""Of what kind the tensors of a module must be: what their dtypes, shapes and devices are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.core.torch_private import TensorGuards, has_storage
from tvmbridge.core.types import InputDescriptor
from tvmbridge.graph_capture.observe.plain import PLAIN


class KindGuard:
    """Compares the tensors of now with those of ``inputs`` that compiled code was made for."""

    def __init__(self, inputs: Sequence[InputDescriptor]) -> None:
        self._expected = [
            (torch.Size(d.spec.shape), d.spec.dtype, d.spec.device, d.requires_grad) for d in inputs
        ]
        self._flags = [d.requires_grad for d in inputs]
        # Says at once that all tensors are as at the last full comparison.
        self._all_alike: TensorGuards | None = None

    def renewed(self) -> KindGuard:
        """The same for a copy of the module."""
        return copy.copy(self)

    def changed(self, tensors: Sequence[torch.Tensor | None], check_grad: bool) -> str | None:
        """In what ``tensors`` are others than the code was compiled for."""
        if self._all_alike is not None and self._all_alike.check(*tensors):
            return None
        reason = self.differs(tensors, check_grad)
        if reason is None:
            self._all_alike = _guards_of(tensors)
        return reason

    def differs(self, tensors: Sequence[torch.Tensor | None], check_grad: bool) -> str | None:
        """The same, looked at one by one."""
        for tensor, (shape, dtype, device, requires_grad) in zip(
            tensors, self._expected, strict=True
        ):
            if type(tensor) not in PLAIN:
                return _not_plain(tensor)
            assert tensor is not None
            if tensor.dtype is not dtype:
                return "the dtype of a parameter or buffer changed"
            if tensor.layout is not torch.strided:
                return "the layout of a parameter or buffer changed"
            if not has_storage(tensor):
                return "a parameter or buffer has left a function transform"
            if tensor.device != device:
                return "the device of a parameter or buffer changed"
            if tensor.shape != shape:
                return "the shape of a parameter or buffer changed"
            if check_grad and tensor.requires_grad is not requires_grad:
                return "requires_grad of a parameter changed"
        return None

    def fits_flags(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether ``requires_grad`` of the ``tensors`` is what the code was compiled for."""
        return [t is not None and t.requires_grad for t in tensors] == self._flags


def _guards_of(tensors: Sequence[torch.Tensor | None]) -> TensorGuards:
    """Compares type, dtype, layout, device, shape and requires_grad of all in one call."""
    plain = [t for t in tensors if t is not None]
    # As PyTorch's own guards call it; the annotations there lack the list of tensors.
    shapes: Any = [list(t.shape) for t in plain]
    strides: Any = [[None] * t.dim() for t in plain]
    return TensorGuards(*plain, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


def _not_plain(tensor: Any) -> str:
    if tensor is None:
        return "a parameter or buffer is missing"
    return "a parameter or buffer is not a plain tensor"

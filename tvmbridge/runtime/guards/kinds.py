"""The guard of kinds: whether a module's tensors have the expected dtypes, shapes and devices."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.calls.plain import PLAIN
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import TensorGuards, has_storage
from tvmbridge.core.types import InputDescriptor

OTHER_SHAPE = Reason(Kind.CHANGED, "the shape of a parameter or buffer")


class KindGuard:
    """Compares a module's present tensors with the kinds that code was compiled for.

    Args:
        inputs: descriptors of the module's tensors among the inputs of the code.
    """

    def __init__(self, inputs: Sequence[InputDescriptor]) -> None:
        self._expected = [
            (torch.Size(d.spec.shape), d.spec.dtype, d.spec.device, d.requires_grad) for d in inputs
        ]
        self._flags = [d.requires_grad for d in inputs]
        # A fast comparison with the tensors of the last full comparison; None: none yet.
        self._all_alike: TensorGuards | None = None

    def renewed(self) -> KindGuard:
        """Return a guard with the same expectations for a copy of the module."""
        return copy.copy(self)

    def changed(self, tensors: Sequence[torch.Tensor | None], check_grad: bool) -> Reason | None:
        """Return how ``tensors`` differ, with ``check_grad`` also in requires_grad; None if not."""
        if self._all_alike is not None and self._all_alike.check(*tensors):
            return None
        reason = self.differs(tensors, check_grad)
        if reason is None:
            self._all_alike = _guards_of(tensors)
        return reason

    def differs(self, tensors: Sequence[torch.Tensor | None], check_grad: bool) -> Reason | None:
        """Return the same as :meth:`changed`, by comparing the tensors one by one."""
        for tensor, (shape, dtype, device, requires_grad) in zip(
            tensors, self._expected, strict=True
        ):
            if type(tensor) not in PLAIN:
                return Reason(Kind.MISSING if tensor is None else Kind.HELD_NOT_PLAIN)
            assert tensor is not None
            if tensor.dtype is not dtype:
                return Reason(Kind.CHANGED, "the dtype of a parameter or buffer")
            if tensor.layout is not torch.strided:
                return Reason(Kind.CHANGED, "the layout of a parameter or buffer")
            if not has_storage(tensor):
                return Reason(Kind.HELD_LEFT_TRANSFORM)
            if tensor.device != device:
                return Reason(Kind.CHANGED, "the device of a parameter or buffer")
            if tensor.shape != shape:
                return OTHER_SHAPE
            if check_grad and tensor.requires_grad is not requires_grad:
                return Reason(Kind.CHANGED, "requires_grad of a parameter")
        return None

    def fits_flags(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether ``requires_grad`` of the ``tensors`` is what the code was compiled for."""
        return [t is not None and t.requires_grad for t in tensors] == self._flags


def _guards_of(tensors: Sequence[torch.Tensor | None]) -> TensorGuards:
    """Return a guard that compares all tensors at once.

    It compares type, dtype, layout, device, shape and ``requires_grad``, but not strides.
    """
    plain = [t for t in tensors if t is not None]
    # As PyTorch's own guards call it; the annotations there lack the list of tensors.
    shapes: Any = [list(t.shape) for t in plain]
    strides: Any = [[None] * t.dim() for t in plain]
    return TensorGuards(*plain, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)

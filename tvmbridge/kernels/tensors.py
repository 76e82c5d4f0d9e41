"""Tensors of compiled code as PyTorch has them, for kernels that take some microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.torch_private import from_dlpack_capsule

Result = TypeVar("Result")


def run_on(function: Callable[..., Result], tensors: Sequence[Any]) -> Result:
    """Call ``function``, which nothing is to be recorded of, with ``tensors`` of TVM.

    The public ``from_dlpack`` asks for device and stream first, which compiled code has settled.
    """
    arguments = [from_dlpack_capsule(tensor.__dlpack__()) for tensor in tensors]
    return without_gradients(function, *arguments)

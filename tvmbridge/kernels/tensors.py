"""Call kernels on tensors of compiled code, with little overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.torch_private import from_dlpack_capsule

Result = TypeVar("Result")


def run_on(function: Callable[..., Result], tensors: Sequence[Any]) -> Result:
    """Convert TVM's ``tensors`` to PyTorch's, and call ``function`` with them, without autograd.

    PyTorch's public ``from_dlpack`` would query device and stream first, which compiled code
    already guarantees.
    """
    arguments = [from_dlpack_capsule(tensor.__dlpack__()) for tensor in tensors]
    return without_gradients(function, *arguments)

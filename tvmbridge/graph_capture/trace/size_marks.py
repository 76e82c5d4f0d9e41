"""The marks by which PyTorch makes sizes of a tensor symbols, put away while torch.export runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree

_MARKS = ("_dynamo_", "_has_dynamo_")


@contextmanager
def size_marks_put_away(arguments: Any) -> Iterator[None]:
    """Within it the tensors among ``arguments`` have no marks; afterwards those that they had.

    ``torch._dynamo.mark_dynamic`` marks tensors for torch.compile. torch.export reads these marks
    as well, and leaves its own on the tensors where it raises.
    """
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    before = [_taken(tensor) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, marks in zip(tensors, before, strict=True):
            _taken(tensor)
            tensor.__dict__.update(marks)


def _taken(tensor: torch.Tensor) -> dict[str, Any]:
    """The marks of a tensor, which are taken away."""
    held = vars(tensor)
    return {name: held.pop(name) for name in list(held) if name.startswith(_MARKS)}

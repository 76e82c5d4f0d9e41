"""Properties of tensors beside their values: shared memory, identity, and memory layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.architectures.compare import leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree, in order."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def detached(value: Any) -> Any:
    """Return a tree with copies of its tensors, which later writes do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _addresses(tensor: torch.Tensor) -> set[int]:
    storage, size = tensor.untyped_storage(), tensor.element_size()
    places = torch.arange(storage.nbytes() // size)
    chosen = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set((chosen.flatten() * size + storage.data_ptr()).tolist())


def sharing(
    results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[tuple[list[bool], list[bool]]]:
    """Return two lists of flags for each result, about ``others`` followed by the results.

    The first says whether the result shares memory with each tensor, the second whether it is the
    same object.
    """
    memory = [_addresses(t) for t in (*others, *results)]
    return [
        (
            [not memory[len(others) + n].isdisjoint(elements) for elements in memory],
            [result is other for other in (*others, *results)],
        )
        for n, result in enumerate(results)
    ]


def order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of the dimensions larger than 1; None if empty or not dense in memory."""
    if not tensor.numel():
        return None
    pairs = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    expected = 1
    for extent, stride in sorted(pairs, key=lambda pair: pair[1]):
        if stride != expected:
            return None
        expected *= extent
    return tuple(stride for _, stride in pairs)

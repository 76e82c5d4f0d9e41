"""Structures of arguments and results: PyTorch's pytrees, with sizes that stay sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """The structure ``spec`` with ``leaves``.

    PyTorch's own function makes a plain tuple where a ``torch.Size`` stood.
    """
    if not _has_size(spec):
        return pytree.tree_unflatten(leaves, spec)
    return _rebuilt(iter(leaves), spec)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    """``structure`` with each tensor in it given to ``function``."""
    leaves, spec = pytree.tree_flatten(structure)
    mapped = [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return unflatten(mapped, spec)


def _children(spec: Any) -> list[Any]:
    """The specs below; PyTorch 2.11 has them under another name."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


def _has_size(spec: Any) -> bool:
    if spec.is_leaf():
        return False
    return spec.type is torch.Size or any(_has_size(child) for child in _children(spec))


def _rebuilt(leaves: Iterator[Any], spec: Any) -> Any:
    if spec.is_leaf():
        return next(leaves)
    parts = [_rebuilt(leaves, child) for child in _children(spec)]
    if spec.type is torch.Size:
        return torch.Size(parts)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)

"""Writes into tensors: the arguments that an operator writes, and a tensor's write counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.torch_private import OpOverload


def written_by(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that ``operator`` writes into, according to its schema."""
    described = enumerate(operator._schema.arguments)
    written = [(i, a.name) for i, a in described if a.alias_info and a.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


def version_of(tensor: torch.Tensor) -> int:
    """Return the write counter of ``tensor``; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version

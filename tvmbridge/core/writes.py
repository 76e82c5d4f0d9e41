"""Writes into tensors: by which arguments an operator makes them, and how often one was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.torch_private import OpOverload


def written_by(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call that ``operator`` writes, as its schema says."""
    described = enumerate(operator._schema.arguments)
    written = [(i, a.name) for i, a in described if a.alias_info and a.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written, as far as that is known."""
    return 0 if tensor.is_inference() else tensor._version

"""Prepare arguments for torch.export, and declare which of their sizes are symbolic."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tvmbridge.core.torch_private import pytree


def spelled_out(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.Signature:
    """Return a signature that names exactly these arguments.

    torch.export assigns symbols to arguments by the signature, and fails for arguments that go to
    ``**kwargs``.
    """
    kinds = inspect.Parameter
    positional = [kinds(f"argument_{i}", kinds.POSITIONAL_ONLY) for i in range(len(args))]
    return inspect.Signature([*positional, *(kinds(k, kinds.KEYWORD_ONLY) for k in kwargs)])


def has_odd_names(arguments: Any) -> bool:
    """Whether a keyword of ``(args, kwargs)``, or a key of a dict among them, is no identifier.

    torch.export writes keywords and keys unquoted into source code that it runs. Integers as keys
    are fine.
    """
    if isinstance(arguments, Mapping):
        return not all(map(_is_written_safely, arguments)) or has_odd_names([*arguments.values()])
    return isinstance(arguments, list | tuple) and any(map(has_odd_names, arguments))


def _is_written_safely(key: Any) -> bool:
    if type(key) is str:
        return key.isidentifier() and not keyword.iskeyword(key)
    return type(key) is int


def dynamic_shapes(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    symbolic: Mapping[int, Mapping[int, Any]],
) -> Any:
    """Return torch.export's ``dynamic_shapes`` for the ``symbolic`` dimensions of each leaf."""
    shapes = torch.export.ShapesCollection()
    leaves = pytree.tree_leaves((args, kwargs))
    for number, dimensions in symbolic.items():
        shapes[leaves[number]] = dict(dimensions)
    return shapes.dynamic_shapes(module, args, kwargs)

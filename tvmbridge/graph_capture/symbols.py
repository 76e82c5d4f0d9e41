"""Prepare arguments for torch.export, and declare which of their sizes are symbolic."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

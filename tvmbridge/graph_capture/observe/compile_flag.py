"""Whether forward takes another path where ``torch.compiler.is_compiling()`` is false.

It is true in a trace, as in compilers, and false in a call. Where the paths of a forward that asks
differ, the one of a call is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import TorchDispatchMode, pytree
from tvmbridge.graph_capture.observe.observation import Observation


class _Operators(TorchDispatchMode):
    """Notes the operators that run, in order, with their arguments beside tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        given = [tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in leaves]
        self.found.append(f"{func}{given}")
        return func(*args, **(kwargs or {}))


def goes_another_way(module: nn.Module, observe: Callable[..., Observation]) -> bool:
    """Whether forward does something else where ``is_compiling()`` is false.

    Args:
        module: whose forward it is.
        observe: observes forward once, ``within`` the given contexts and ``is_compiling`` or not.

    Raises:
        CaptureError: what it does in a call cannot be told.
    """
    traced, called = _Operators(), _Operators()
    try:
        ours, theirs = observe(within=[traced]), observe(within=[called], is_compiling=False)
    except Exception as error:
        raise CaptureError(
            f"forward of {type(module).__name__} asks whether it is compiled "
            f"(torch.compiler.is_compiling or the like), and cannot be followed where it is not "
            f"({error})"
        ) from error
    return traced.found != called.found or _effects(ours) != _effects(theirs)


def _effects(seen: Observation) -> list[Any]:
    left = dict(seen.left)
    return [seen.writes, dict(seen.assigned), left, seen.impure, seen.changes, seen.rebound]

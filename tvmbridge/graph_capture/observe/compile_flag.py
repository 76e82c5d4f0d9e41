"""Decide whether forward behaves differently when ``torch.compiler.is_compiling()`` is False.

The function returns True in a trace, as under PyTorch's own compilers, and False in a call. If
forward calls it and behaves differently in the two cases, the behavior of a call is traced.
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
    """Record the operators that run, in order, with the shapes of tensors and other arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        given = [tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in leaves]
        self.found.append(f"{func}{given}")
        return func(*args, **(kwargs or {}))


def goes_another_way(module: nn.Module, observe: Callable[..., Observation]) -> bool:
    """Whether forward runs other operators or has other effects if ``is_compiling()`` is False.

    Args:
        observe: observes forward once; ``within`` are contexts to run it in, and ``is_compiling``
            is the value that ``torch.compiler.is_compiling()`` returns.

    Raises:
        CaptureError: forward cannot be observed with ``is_compiling()`` False.
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

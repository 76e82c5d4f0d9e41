"""Other ways: what forward does where it is told that it is not compiled.

A trace tells forward that it is (``torch.compiler.is_compiling``), as compilers do. A forward that
asks may take another way in a call, which must be the same computation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tvmbridge.errors import CaptureError
from tvmbridge.observing.observation import Observation

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
Observe = Callable[[list[AbstractContextManager[Any]]], Observation]


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


def refuse_other_way(module: nn.Module, observe: Observe) -> None:
    """Compare what forward does in a trace with what it does in a call.

    Args:
        module: whose forward it is.
        observe: observes forward once within the given contexts.

    Raises:
        CaptureError: it is not the same, or cannot be told.
    """
    traced, called = _Operators(), _Operators()
    place = torch.compiler
    told = [mock.patch.object(place, flag, False) for flag in _FLAGS]
    why = "does something else where it is not"
    try:
        ours, theirs = observe([traced]), observe([called, *told])
    except Exception as error:
        why = f"cannot be followed where it is not ({error})"
    else:
        same = traced.found == called.found and _effects(ours) == _effects(theirs)
        if same:
            return
    raise CaptureError(
        f"forward of {type(module).__name__} asks whether it is compiled "
        f"(torch.compiler.is_compiling or the like), and {why}"
    )


def _effects(seen: Observation) -> list[Any]:
    return [seen.writes, dict(seen.assigned), seen.impure, seen.changes, seen.rebound]

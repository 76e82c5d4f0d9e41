"""Keep calls that have no effect out of a trace.

Examples are ``self.linear.to(x.dtype)`` if the module already has this dtype, inactive dropout,
and checks that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.patches import patched_here, patches
from tvmbridge.core.torch_private import disable_current_modes
from tvmbridge.graph_capture.trace.function_table import Call, replaces


@patches(nn.Module, "_apply")
def _apply(
    genuine: Callable[..., nn.Module],
    module: nn.Module,
    fn: Callable[..., Any],
    recurse: bool = True,
) -> nn.Module:
    """Return ``module`` unchanged from ``module.to(...)`` if dtype and device stay the same."""
    with disable_current_modes():
        kinds = {(t.dtype, t.device) for t in (*module.parameters(), *module.buffers())}
        probes = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
        if all(fn(probe) is probe for probe in probes):
            return module
    return genuine(module, fn, recurse)


@contextmanager
def checks_of_numbers() -> Iterator[None]:
    """Let ``torch._check`` accept an integer as a bool within the context.

    The fake kernel of ``upsample_nearest2d`` passes an integer size for an empty input.
    """

    def check(genuine: Callable[..., Any], cond: Any, *args: Any, **kwargs: Any) -> Any:
        return genuine(bool(cond) if type(cond) is int else cond, *args, **kwargs)

    with patched_here(torch, "_check", check):
        yield


def dropout_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, float, bool, bool]:
    """Return the tensor, the rate, ``training`` and ``inplace`` of a call of dropout."""
    named = {"training" if name == "train" else name: value for name, value in kwargs.items()}
    return _in_order(*args, **named)


def _in_order(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[torch.Tensor, float, bool, bool]:
    return input, p, training, inplace


@replaces(nn.functional.dropout, torch.dropout)
def _dropout(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument itself from inactive dropout, as in eager PyTorch.

    ``torch.export`` would record a new tensor, and a mutation of the result would not reach the
    argument.
    """
    tensor, p, training, _ = dropout_arguments(args, kwargs)
    return tensor if 0 <= p <= 1 and (not training or p == 0) else call(*args, **kwargs)

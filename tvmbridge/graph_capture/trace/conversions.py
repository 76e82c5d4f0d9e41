"""What does nothing, and is to be traced as nothing: conversions of modules in forward, such as
``self.linear = self.linear.to(x.dtype)``, dropout that drops nothing, checks that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tvmbridge.core.torch_private import disable_current_modes
from tvmbridge.graph_capture.trace.patches import patched_here


@contextmanager
def conversions_without_effect() -> Iterator[None]:
    """Within it ``module.to(dtype)`` may be traced where the module has that dtype already."""

    def apply(
        convert: Any, module: nn.Module, fn: Callable[..., Any], recurse: bool = True
    ) -> nn.Module:
        with disable_current_modes():
            kinds = {(t.dtype, t.device) for t in (*module.parameters(), *module.buffers())}
            probes = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
            if all(fn(probe) is probe for probe in probes):
                return module
        return convert(module, fn, recurse)

    with patched_here(nn.Module, "_apply", apply):
        yield


@contextmanager
def checks_of_numbers() -> Iterator[None]:
    """Within it PyTorch's own fake kernels may check a number for not being zero.

    That of ``upsample_nearest2d`` does so with the size of an empty input.
    """

    def check(genuine: Callable[..., Any], cond: Any, *args: Any, **kwargs: Any) -> Any:
        return genuine(bool(cond) if type(cond) is int else cond, *args, **kwargs)

    with patched_here(torch, "_check", check):
        yield


def _drops_nothing(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> bool:
    return not training or p == 0


class DropoutWithoutEffect(TorchFunctionMode):
    """Within it dropout that drops nothing returns its argument itself, as eager PyTorch does.

    ``torch.export`` takes it for a tensor of its own, so that writing into it would not be seen
    by who holds the argument.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is nn.functional.dropout and _drops_nothing(*args, **named):
            return args[0] if args else named["input"]
        if func is torch.dropout:
            named["training"] = named.pop("train", True) if len(args) < 3 else args[2]
            if _drops_nothing(*args[:2], **named):
                return args[0] if args else named["input"]
        return func(*args, **(kwargs or {}))

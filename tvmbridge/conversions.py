"""Conversions of modules in forward, such as ``self.linear = self.linear.to(x.dtype)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tvmbridge.patches import patched_here


@contextmanager
def conversions_without_effect() -> Iterator[None]:
    """Within it ``module.to(dtype)`` may be traced where the module has that dtype already."""

    def apply(
        convert: Any, module: nn.Module, fn: Callable[..., Any], recurse: bool = True
    ) -> nn.Module:
        with _disable_current_modes():
            kinds = {(t.dtype, t.device) for t in (*module.parameters(), *module.buffers())}
            probes = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
            if all(fn(probe) is probe for probe in probes):
                return module
        return convert(module, fn, recurse)

    with patched_here(nn.Module, "_apply", apply):
        yield

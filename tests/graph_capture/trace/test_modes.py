"""A forward that enters a dispatch mode of the user runs in eager PyTorch, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tvmbridge import add_tvm_dispatch, dispatch_report


class Doubling(TorchDispatchMode):
    """Doubles every sine."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


class Sine(nn.Module):
    """Computes a sine within the mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Doubling():
            return torch.sin(x) + 1


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_mode_is_in_force(needs_grad: bool) -> None:
    module = Sine()
    x = torch.randn(3, 4, requires_grad=needs_grad)
    add_tvm_dispatch(module, on_fallback="silent")
    for _ in range(2):
        torch.testing.assert_close(module(x), torch.sin(x) * 2 + 1)
    ((reason, count),) = dispatch_report(module).fallbacks.items()
    assert "dispatch mode Doubling" in reason
    assert count == 2

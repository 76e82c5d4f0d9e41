"""Backward frees each value that forward has kept for it after its last use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch
from tvmbridge.core.compiled_half import compiled_half


def _made() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    eager = eager.double()
    ours, x = copy.deepcopy(eager), torch.randn(4, 6, dtype=torch.float64)
    add_tvm_dispatch(ours, (x,), options={"only_if_faster": False})
    return ours, eager, x


def _gradients(module: nn.Module, output: torch.Tensor, retain: bool) -> Any:
    return torch.autograd.grad(
        output, list(module.parameters()), torch.ones_like(output), retain_graph=retain
    )


@pytest.mark.skipif(compiled_half("tvmbridge.kernels._products") is None, reason="needs the half")
def test_residuals_are_freed_within_backward() -> None:
    ours, eager, x = _made()
    output, expected = ours(x), eager(x)
    residuals = output.grad_fn.step.residuals  # type: ignore[union-attr]
    count = len(residuals)
    assert count
    for retain in (True, True, False):
        found = _gradients(ours, output, retain)
        torch.testing.assert_close(found, _gradients(eager, expected, retain))
        assert len(residuals) == (count if retain else 0)
    with pytest.raises(RuntimeError, match="second time"):
        _gradients(ours, output, False)


def test_a_backward_that_failed_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager, x = _made()
    output = ours(x)
    code = output.grad_fn.step.call.compiled  # type: ignore[union-attr]
    genuine = type(code).backward

    def failing(self: Any, *args: Any) -> Any:
        genuine(self, *args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(code), "backward", failing)
        with pytest.raises(MemoryError):
            _gradients(ours, output, False)
    with pytest.raises(RuntimeError, match="run forward again"):
        _gradients(ours, output, False)
    torch.testing.assert_close(_gradients(ours, ours(x), False), _gradients(eager, eager(x), False))

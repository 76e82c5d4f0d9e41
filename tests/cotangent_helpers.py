"""Helpers for tests in which backward starts from only some outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report

SAMPLE = torch.tensor([[0.0, 1.0, -2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 1.0]], dtype=torch.float64)


def gradients(
    module: nn.Module, used: Sequence[int], x: torch.Tensor = SAMPLE
) -> dict[str, torch.Tensor | None]:
    """Run backward from the outputs ``used``; return the gradients of input and parameters."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    outputs = module(x)
    chosen = [outputs[i] for i in used]
    torch.autograd.backward(chosen, [torch.full_like(o, 1.3) for o in chosen])
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_same(
    ours: dict[str, torch.Tensor | None], eager: dict[str, torch.Tensor | None]
) -> None:
    """Assert that gradients equal eager's up to rounding, and are None for the same names."""
    for name, expected in eager.items():
        found = ours[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-12, atol=1e-12)


def dispatched(module: nn.Module, joint: str = "auto", x: torch.Tensor = SAMPLE) -> nn.Module:
    """Return a dispatched copy of ``module``."""
    ours = copy.deepcopy(module)
    sample = x.clone().requires_grad_()
    return add_tvm_dispatch(ours, (sample,), options=CompileOptions(joint=joint))


def partial_backwards(module: nn.Module) -> int:
    return sum(s.partial_backwards for s in dispatch_report(module).specializations)


def custom(backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> type:
    """Return an autograd function that doubles; ``backward`` gets the cotangent and the input."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            return backward(g, ctx.saved_tensors[0])

    return Custom


class Trunk(nn.Module):
    """A module with two outputs that a custom function computes, and a third that it does not."""

    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.scale * x
        doubled = self.function.apply(hidden)  # type: ignore[attr-defined]
        return doubled.sum(), doubled.abs().sqrt(), hidden.sum()

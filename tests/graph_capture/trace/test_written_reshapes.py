"""Writes into the result of ``reshape`` reach its base if the result is a view, else a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.frontend.helpers import Function
from tests.thinned import covering
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import CaptureError


def _last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _attention(x: torch.Tensor) -> torch.Tensor:
    rows = x.transpose(1, 2)
    return functional.scaled_dot_product_attention(rows, rows, rows)


def _unpooled(x: torch.Tensor) -> torch.Tensor:
    return functional.max_unpool2d(*functional.max_pool2d(_last(x), 2, return_indices=True), 2)


# Functions whose fake kernels or decompositions give other strides than PyTorch's kernels.
MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": _attention,
    "batch norm": lambda x: functional.batch_norm(x[0].mT * 1, None, None, training=True),
    "channels shuffled": lambda x: functional.channel_shuffle(_last(x), 2),
    "replicated": lambda x: functional.pad(_last(x), (1, 1, 1, 1), mode="replicate"),
    "unpooled": _unpooled,
}
TAKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "ravel": lambda y: y.ravel(),
    "contiguous": lambda y: y.contiguous(),
    "channels last": lambda y: y.movedim(1, -1).reshape(-1),
    "rows first": lambda y: y.transpose(1, -2).reshape(-1),
}
REFUSED = [("attention", "rows first"), ("channels shuffled", "channels last")]
if torch.__version__.startswith("2.11."):  # whose replicated padding is contiguous in a trace
    REFUSED.append(("replicated", "channels last"))


@pytest.mark.parametrize(("made", "joint"), covering([*MADE], ["auto", None, "aot"]), ids=str)
def test_writes_reach_what_they_reach_in_eager_pytorch(made: str, joint: Any) -> None:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for name, taken in TAKEN.items():
            if (made, name) in REFUSED:
                continue
            base = MADE[made](x)
            part = taken(base)
            part.add_(3)
            results += [base * 2, part + 1]
        return results

    plain, ours = Function(forward), Function(forward)
    sample = torch.randn(2, 4, 4, 4, dtype=torch.float64, requires_grad=joint is not None)
    add_tvm_dispatch(ours, sample, options=CompileOptions(joint=joint or "auto"))
    x = torch.randn(2, 4, 4, 4, dtype=torch.float64, requires_grad=joint is not None)
    found = [module(x) for module in (ours, plain)]
    assert dispatch_report(ours).fallbacks == {}
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert [r.stride() for r in found[0]] == [r.stride() for r in found[1]]
    if joint is not None:
        cotangents = [torch.randn_like(r) for r in found[1]]
        gradients = [torch.autograd.grad(results, x, cotangents) for results in found]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("made", "taken"), REFUSED)
def test_views_that_the_parts_of_an_operator_cannot_give_are_refused(made: str, taken: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        base = MADE[made](x)
        TAKEN[taken](base).mul_(3)
        return base + 1

    with pytest.raises(CaptureError, match="Cannot view"):
        add_tvm_dispatch(Function(forward), torch.randn(2, 4, 4, 4))

"""Autocast regions in forward give eager PyTorch's dtypes, or forward is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import tvmbridge
from tests.frontend.helpers import Function
from tvmbridge.core.errors import BridgeError

Body = Callable[[torch.Tensor], torch.Tensor]


def _within(body: Body) -> Body:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return body(x)

    return forward


OTHER_DTYPES: dict[str, Body] = {
    "affine_grid": lambda x: functional.affine_grid(x[:, :2, :3], (4, 1, 5, 6)),
    "cov": lambda x: torch.cov(x[0]),
    "corrcoef": lambda x: x[0].corrcoef(),
}


@pytest.mark.parametrize("body", OTHER_DTYPES.values(), ids=OTHER_DTYPES)
def test_operators_whose_parts_autocast_reaches_are_refused(body: Body) -> None:
    x = torch.randn(4, 8, 8)
    assert _within(body)(x).dtype is torch.bfloat16
    with pytest.raises(BridgeError, match="under autocast gives bfloat16"):
        tvmbridge.add_tvm_dispatch(Function(_within(body)), x)
    module = Function(lambda x: body(x) + _within(lambda y: y @ y)(x).sum())
    tvmbridge.add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), module.function(x))
    assert tvmbridge.dispatch_report(module).fallbacks == {}


def test_the_fast_path_of_an_encoder_layer_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(4, 8, 8)
    with torch.no_grad(), pytest.raises(BridgeError, match="under autocast in eval mode"):
        tvmbridge.add_tvm_dispatch(Function(_within(layer)), x)


def test_what_autocast_leaves_and_what_it_casts_has_eagers_dtype() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            grid = functional.affine_grid(x[:, :2, :3], (4, 1, 5, 6))
        return (
            x @ x,
            functional.linear(x, x[0]),
            x.softmax(-1) + 1,
            functional.mse_loss(x @ x, x),
            grid,
        )

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return body(x)

    x = torch.randn(4, 8, 8)
    module = Function(forward)
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), forward(x))
    assert tvmbridge.dispatch_report(module).fallbacks == {}

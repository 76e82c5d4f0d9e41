"""Constant masks of attention: dropped where they say nothing, kept where they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.dispatch_helpers import eager
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.capture import capture

Mask = Callable[[torch.Tensor], torch.Tensor]


def _open(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.shape[-2]) + 0 >= 0)[None, None, :, None].expand(1, 1, -1, x.shape[-2])


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[-2], x.shape[-2])


def _causal(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[-2])
    return (places[None] <= places[:, None])[None, None]


def _window(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[-2])
    return (places[None] - places[:, None]).abs() < 3


def _random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape[-2], x.shape[-2]) > 2.0 * torch.eye(x.shape[-2]).sub(1).abs()


def _of_input(x: torch.Tensor) -> torch.Tensor:
    return (x[..., 0] == x[..., 0])[..., None, :]


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, self.mask(x))


@pytest.mark.parametrize(
    ("mask", "kept", "causal"),
    [
        (_open, False, False),
        (_zeros, False, False),
        (_causal, False, True),
        (_window, True, False),
        (_random, True, False),
        (_of_input, True, False),
    ],
)
def test_what_says_nothing_goes(mask: Mask, kept: bool, causal: bool) -> None:
    x = torch.randn(2, 3, 9, 8)
    module = Attention(mask).eval()
    with torch.no_grad():
        graph = capture(module, x).program.graph
        (node,) = [n for n in graph.nodes if "scaled_dot_product_attention" in str(n.target)]
        given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False))
        given |= node.kwargs
        assert (given.get("attn_mask") is not None) == kept
        assert bool(given.get("is_causal")) == causal
        reference = eager(module)
        add_tvm_dispatch(module, x)
        torch.manual_seed(1)
        found = module(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, reference(x), rtol=1e-5, atol=1e-6)
    assert dispatch_report(module).tvm_calls == 1

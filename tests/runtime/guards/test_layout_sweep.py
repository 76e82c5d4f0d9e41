"""Outputs and gradients of many modules have eager PyTorch's strides and values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from tvmbridge import add_tvm_dispatch, dispatch_report

pytestmark = pytest.mark.slow

LAST = torch.channels_last


class Function(nn.Module):
    """A module whose forward is a function of its submodules and arguments."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ModuleList(modules)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*self.held, *args)


def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def last() -> torch.Tensor:
    return image().contiguous(memory_format=LAST)


def volume() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)


def tokens() -> torch.Tensor:
    return torch.randn(2, 5, 6)


def turned() -> torch.Tensor:
    return torch.randn(2, 6, 5).transpose(1, 2)


def on(function: Callable[..., Any], *modules: nn.Module) -> nn.Module:
    return Function(function, *modules)


def attention(q: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, q, q)


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "conv": lambda: (nn.Conv2d(3, 4, 3), last()),
    "conv_weights": lambda: (nn.Conv2d(3, 4, 3).to(memory_format=LAST), image()),
    "conv_groups": lambda: (nn.Conv2d(3, 6, 3, groups=3), last()),
    "conv_1x1": lambda: (nn.Conv2d(3, 4, 1), last()),
    "conv_gray": lambda: (nn.Conv2d(1, 4, 3), image()[:, :1].contiguous(memory_format=LAST)),
    "conv_transposed": lambda: (nn.ConvTranspose2d(3, 4, 3), last()),
    "conv3d": lambda: (
        nn.Sequential(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU()),
        volume(),
    ),
    "block": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        last(),
    ),
    "dropout": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5)), last()),
    "avg_pool": lambda: (nn.AvgPool2d(2), last()),
    "adaptive_1": lambda: (nn.AdaptiveAvgPool2d(1), last()),
    "adaptive_2": lambda: (nn.AdaptiveAvgPool2d(2), last()),
    "adaptive_max": lambda: (nn.AdaptiveMaxPool2d(2), last()),
    "nearest": lambda: (nn.Upsample(scale_factor=2), last()),
    "bilinear": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), last()),
    "group_norm": lambda: (nn.GroupNorm(1, 3), last()),
    "instance_norm": lambda: (nn.InstanceNorm2d(3), last()),
    "layer_norm": lambda: (nn.LayerNorm(8), last()),
    "gelu": lambda: (nn.GELU(), last()),
    "prelu": lambda: (nn.PReLU(3), last()),
    "shuffle": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.PixelShuffle(2)), last()),
    "unfold": lambda: (nn.Unfold(2), last()),
    "pad": lambda: (on(lambda x: functional.pad(x, (1, 1))), last()),
    "cat": lambda: (on(lambda x: torch.cat([x, x * 2], 1)), last()),
    "where": lambda: (on(lambda x: torch.where(x > 0, x, x * 2)), last()),
    "index": lambda: (on(lambda x: (x * 2)[:, torch.tensor([0, 2])]), last()),
    "double": lambda: (on(lambda x: (x * 2).double()), last()),
    "max": lambda: (on(lambda x: x.max(1)), last()),
    "contiguous_first": lambda: (on(lambda x, y: x + y), image(), last()),
    "contiguous_last": lambda: (on(lambda x, y: x + y), last(), image()),
    "patches": lambda: (
        on(lambda c, x: c(x).flatten(2).transpose(1, 2), nn.Conv2d(3, 4, 4, 4)),
        last(),
    ),
    "inside": lambda: (
        on(
            lambda c, x: c(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1),
            nn.Conv2d(6, 4, 3),
        ),
        torch.randn(2, 5, 5, 6),
    ),
    "product": lambda: (on(lambda m, x: m(x).transpose(1, 2), nn.Linear(6, 7)), tokens()),
    "read_again": lambda: (
        on(lambda m, x: torch.tanh(m(x)).transpose(1, 2), nn.Linear(6, 7)),
        tokens(),
    ),
    "permuted": lambda: (on(lambda m, x: m(x).permute(2, 0, 1).exp(), nn.Linear(6, 7)), tokens()),
    "views": lambda: (
        on(lambda m, x: (lambda y: (y, y.transpose(1, 2)))(m(x)), nn.Linear(6, 7)),
        tokens(),
    ),
    "turned": lambda: (on(lambda x: x * 2 + 1), turned()),
    "softmax": lambda: (on(lambda x: x.softmax(1)), turned()),
    "sort": lambda: (on(lambda x: x.sort(1)), turned()),
    "cumsum": lambda: (on(lambda x: x.cumsum(1)), turned()),
    "bmm": lambda: (on(lambda x: x.transpose(1, 2) @ x), tokens()),
    "einsum": lambda: (on(lambda x: torch.einsum("bij,bkj->bki", x, x)), tokens()),
    "sdpa": lambda: (on(attention), torch.randn(2, 5, 4, 8).transpose(1, 2)),
    "multihead": lambda: (nn.MultiheadAttention(6, 2, batch_first=True), *[tokens()] * 3),
    "encoder": lambda: (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), tokens()),
    "lstm": lambda: (nn.LSTM(6, 4, batch_first=True), tokens()),
    "embedding": lambda: (
        on(lambda e, i: e(i).transpose(1, 2), nn.Embedding(10, 4)),
        torch.randint(0, 10, (3, 5)),
    ),
    "svd": lambda: (
        on(lambda x: torch.linalg.svd(x, full_matrices=False)[1:2]),
        torch.randn(4, 3),
    ),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_strides(name: str, training: bool) -> None:
    eager, *args = CASES[name]()
    ours = copy.deepcopy(eager.train(training))
    given = [[a.detach().clone() for a in args] for _ in range(2)]
    for arguments in given:
        for argument in arguments:
            argument.requires_grad_(training and argument.is_floating_point())
    results = []
    with torch.set_grad_enabled(training):
        add_tvm_dispatch(ours, tuple(given[0]))
        for module, arguments in zip((ours, eager), given, strict=True):
            torch.manual_seed(1)
            leaves = pytree.tree_leaves(module(*arguments))
            results.append([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    assert not dispatch_report(ours).fallbacks
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert [r.stride() for r in results[0]] == [r.stride() for r in results[1]]
    flowing = [[r for r in leaves if r.requires_grad] for leaves in results]
    if not flowing[0]:
        return
    cotangents = [torch.randn_like(r) for r in flowing[1]]
    gradients = []
    for leaves, module, arguments in zip(flowing, (ours, eager), given, strict=True):
        wanted = [t for t in (*arguments, *module.parameters()) if t.requires_grad]
        gradients.append(torch.autograd.grad(leaves, wanted, cotangents))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    # The stride of a dimension of size 1 has no meaning.
    for actual, expected in zip(*gradients, strict=True):
        order = sorted(range(actual.dim()), key=expected.stride, reverse=True)
        assert actual.permute(order).is_contiguous() == expected.permute(order).is_contiguous()

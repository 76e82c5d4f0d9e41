"""ChannelsLast: results are those of eager PyTorch, and images are permuted at the ends alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from tests.passes.relax.lowered import lowered_text
from tests.relax_helpers import build_main, compile_and_run
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.channels_last import ChannelsLast
from tvmbridge.passes.relax.collapse_views import CollapseViews
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination

_PASSES = (ChannelsLast(("float64",)), CollapseViews(), DeadCodeElimination())
OPTIONS = CompileOptions(extra_passes=_PASSES)


class _Block(nn.Module):
    """Squeeze and excite, a depthwise convolution, pooling, and a layer norm over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        self.depthwise = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.layer_norm, self.linear = nn.LayerNorm(channels), nn.Linear(channels, channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.first(x)))
        gate = self.excite(functional.silu(self.squeeze(y.mean((2, 3), keepdim=True))))
        y = functional.gelu(self.depthwise(y * gate.sigmoid())) * self.scale
        y = functional.max_pool2d(y, 3, 1, 1) + functional.avg_pool2d(y, 3, 1, 1)
        y = y + self.linear(self.layer_norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return torch.cat([functional.hardswish(y) + x, x], 1)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), _Block(8))
        self.patches = nn.Conv2d(16, 6, 2, 2)
        self.up = nn.ConvTranspose2d(16, 3, 2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.body(x)
        rows = torch.arange(y.shape[-1], dtype=y.dtype)
        ends = self.patches(y).flatten(2).transpose(1, 2), self.up(y), y + rows, y.flatten(1)
        reduced = y.mean((2, 3)), y.amax(1), y.sum((0, 2, 3)), y.mean((1,), keepdim=True)
        return y, *ends, *reduced, torch.std(y, (2, 3)), functional.max_pool2d(y, 2, 2)


@torch.no_grad()
def test_results_are_those_of_eager() -> None:
    module, x = _Network().double().eval(), torch.randn(2, 3, 17, 15, dtype=torch.float64)
    expected = module(x)
    add_tvm_dispatch(module, (x,), options=OPTIONS)
    for found, wanted in zip(module(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert found.stride() == wanted.stride()
    assert dispatch_report(module).tvm_calls == 1


@torch.no_grad()
def test_indices_of_a_pooling_are_those_of_eager() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, indices = functional.max_pool2d(self.convolution(x), 2, return_indices=True)
            return values, indices

    module, x = Pool().double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    values, indices = module(x)
    add_tvm_dispatch(module, (x,), options=OPTIONS)
    found = module(x)
    torch.testing.assert_close(found[0], values, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[1], indices)


@torch.no_grad()
def test_images_are_permuted_at_the_ends_alone() -> None:
    block = nn.Sequential(nn.Conv2d(3, 8, 3), _Block(8))
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    text = lowered_text(block.double().eval(), (x,), OPTIONS)["forward"]
    assert text.count('data_layout="NHWC"') == 5
    assert 'data_layout="NCHW"' not in text
    # The input, and the weights of two convolutions whose channels are moved.
    assert text.count("axes=[0, 2, 3, 1]") == 3
    assert text.count("axes=[0, 3, 1, 2]") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_other_dtypes_are_left(dtype: torch.dtype) -> None:
    options = CompileOptions(extra_passes=(ChannelsLast(),), measure_kernels=False)
    x = torch.randn(2, 3, 9, 9, dtype=dtype)
    text = lowered_text(nn.Conv2d(3, 8, 3).to(dtype).eval(), (x,), options)["forward"]
    assert 'data_layout="NCHW"' in text


@pytest.mark.parametrize(
    "formula",
    [
        lambda image: op.concat(relax.BlockBuilder.current().emit(op.split(image, 2, 1)), 0),
        lambda image: op.concat(relax.BlockBuilder.current().emit(op.split(image, [1], 3)), 1),
        lambda image: op.sum(image, axis=[]),
    ],
    ids=["a number of parts", "places of parts", "a sum over no axis"],
)
def test_unusual_readers_of_images(formula: Callable[[relax.Expr], relax.Expr]) -> None:
    def convolved(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return formula(relax.BlockBuilder.current().emit(op.nn.conv2d(x, w)))

    x, w = torch.randn(2, 4, 4, 2), torch.randn(6, 4, 1, 1)
    mod = build_main((x, w), convolved)
    moved = ChannelsLast(("float32",))(mod)
    assert not moved.same_as(mod)
    found, wanted = compile_and_run(moved, x, w), compile_and_run(mod, x, w)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)

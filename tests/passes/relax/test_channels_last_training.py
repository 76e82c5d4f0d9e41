"""ChannelsLast in training: gradients are those of eager PyTorch, and images keep channels last."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.passes.relax.lowered import lowered_text
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.channels_last import ChannelsLast
from tvmbridge.passes.relax.collapse_views import CollapseViews
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination

_PASSES = (ChannelsLast(("float64",)), CollapseViews(), DeadCodeElimination())
_GRADIENT = "aten.convolution_backward"


class _Network(nn.Module):
    """Batch norms, poolings, a depthwise and a split convolution, and pixels as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.part = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.linear, self.last = nn.Linear(8, 8), nn.Conv2d(8, 6, 3)
        self.up = nn.ConvTranspose2d(6, 3, 2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = functional.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        y = y + functional.silu(self.norm(self.depthwise(y)))
        y = y * self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        first, second = y.split(4, 1)
        y = torch.cat(
            [self.part(first) + second, first[:, :, :, 1:].mean(3, keepdim=True) * second], 1
        )
        y = functional.avg_pool2d(y, 3, 1, 1) + functional.adaptive_avg_pool2d(y, (1, 1))
        rows = self.linear(y.flatten(2).transpose(1, 2))
        y = y + rows.transpose(1, 2).unflatten(2, y.shape[2:])
        y = functional.interpolate(y, scale_factor=2)
        y = self.last(y)
        return y.mean((2, 3)), self.up(y), functional.avg_pool2d(y, 2).flatten(1)


def _learned(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    outputs = module(x)
    torch.autograd.backward(outputs, [torch.cos(o.detach()) for o in outputs])
    assert x.grad is not None
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)} | {"input": x.grad}
    found |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return found | dict(module.named_buffers())


@pytest.mark.parametrize("source", [pytest.param("relax", marks=pytest.mark.slow), "aot"])
def test_gradients_are_those_of_eager(source: str) -> None:
    torch.manual_seed(0)
    ours, x = _Network().double(), torch.randn(3, 3, 27, 30, dtype=torch.float64)
    eager = copy.deepcopy(ours)
    add_tvm_dispatch(ours, (x,), options=CompileOptions(extra_passes=_PASSES, joint=source))
    wanted, found = _learned(eager, x), _learned(ours, x)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-11, msg=name)
        assert value.stride() == wanted[name].stride(), name
    assert dispatch_report(ours).tvm_calls == 1


def test_images_are_not_permuted_between_gradients() -> None:
    convolutions = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)
    first, second, third = convolutions
    body = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.MaxPool2d(2), third)
    x = torch.randn(5, 3, 17, 15, dtype=torch.float64)
    options = CompileOptions(extra_passes=_PASSES, joint="aot")
    lines = "\n".join(lowered_text(body.double(), (x,), options).values()).splitlines()
    images = [line for line in lines if "permute_dims" in line and "R.Tensor((5, " in line]
    # The input in forward and backward, the result, and its cotangent.
    assert len(images) <= 4, images
    calls = [line for line in lines if _GRADIENT in line]
    assert len(calls) == 3
    assert all('{\\"channels_last\\": 0}' in line for line in calls)

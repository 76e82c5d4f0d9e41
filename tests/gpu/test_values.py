"""Forward and gradients of modules on a GPU, in each floating dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.gpu.blocks import Block, LlamaBlock
from tests.gpu.helpers import GPU, STEPS, check, small
from tvmbridge import add_tvm_dispatch, dispatch_report

pytestmark = GPU


class LogSoftmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x, -1) * torch.tanh(x).sum(-1, keepdim=True)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) * x.amax(-1, keepdim=True)


class CrossEntropy(nn.Module):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x, target, label_smoothing=0.1)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(101, 48), nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.table(x))


class Reductions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0) * 2 + x.mean() + (x * 0.1).exp().mean(1).sum() + x.amax((0, 1))


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(1, 2).contiguous() + 1).tanh().permute(2, 0, 1) * 3


class HostConstants(nn.Module):
    """A module with tensors that model libraries create on the CPU: bucket indices, and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        far = torch.log(places.float() / 3 + 1) / torch.log(torch.tensor(7.0)) * 5
        bias = self.bias(far.to(torch.int64).to(x.device))
        scale = torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float32))
        return (x + bias) / scale.to(x.dtype) + torch.ones(24, device=x.device)


class ReturnedConstant(nn.Module):
    """A module that returns a number created on the CPU and moved, like a sliding-window cache."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.tanh(), torch.tensor(7).to(x.device)


def _conv(norm: nn.Module, act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm, act, nn.Conv2d(16, 4, 3, stride=2))


def _images() -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 3, 17, 17),)


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]

CASES: dict[str, Case] = {
    "mlp": (small, lambda: (torch.randn(33, 64),)),
    "one output": (lambda: nn.Sequential(nn.Linear(64, 1)), lambda: (torch.randn(33, 64),)),
    "few rows": (lambda: nn.Linear(524, 251), lambda: (torch.randn(5, 524),)),
    "batch norm": (lambda: _conv(nn.BatchNorm2d(16), nn.ReLU()), _images),
    "group norm": (lambda: _conv(nn.GroupNorm(4, 16), nn.SiLU()), _images),
    "layer norm": (lambda: _conv(nn.LayerNorm((16, 17, 17)), nn.GELU()), _images),
    "softmax, long rows": (Softmax, lambda: (torch.randn(3, 30001),)),
    "softmax, odd rows": (Softmax, lambda: (torch.randn(257, 19),)),
    "log_softmax, long rows": (LogSoftmax, lambda: (torch.randn(3, 9999),)),
    "cross entropy": (
        CrossEntropy,
        lambda: (torch.randn(65, 1001), torch.randint(0, 1001, (65,))),
    ),
    "constants on the CPU": (HostConstants, lambda: (torch.randn(3, 33, 24),)),
    "embedding": (Embedded, lambda: (torch.randint(0, 101, (5, 33)),)),
    "reductions": (Reductions, lambda: (torch.randn(301, 127),)),
    "transposes": (Transposed, lambda: (torch.randn(3, 37, 65),)),
    "gpt2": (lambda: Block(64, 4, causal=True), lambda: (torch.randn(2, 24, 64),)),
    "llama": (lambda: LlamaBlock(64, 4, 24), lambda: (torch.randn(2, 24, 64),)),
    "vit": (lambda: Block(64, 4, causal=False), lambda: (torch.randn(2, 17, 64),)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_training_step(name: str, dtype: torch.dtype) -> None:
    make, args = CASES[name]
    check(make, args(), dtype)


@pytest.mark.parametrize("name", ["mlp", "batch norm", "softmax, odd rows", "llama"])
def test_a_training_step_in_float16(name: str) -> None:
    make, args = CASES[name]
    check(make, args(), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["mlp", "few rows", "batch norm", "softmax, long rows", "gpt2", "embedding"]
)
def test_inference(name: str, dtype: torch.dtype) -> None:
    make, args = CASES[name]
    check(make, args(), dtype, train=False)


def test_a_returned_constant_is_another_tensor_at_each_call() -> None:
    x = torch.randn(5, 7, device="cuda")
    tvm = add_tvm_dispatch(ReturnedConstant().cuda(), x)
    kept = []
    for _ in range(STEPS):
        output, number = tvm(x)
        torch.testing.assert_close(output, x.tanh())
        assert number.device == x.device
        assert int(number) == 7
        kept.append(number.add_(1))
    assert len({n.data_ptr() for n in kept}) == STEPS
    assert not dispatch_report(tvm).fallbacks


def test_a_graph_without_inputs_is_on_the_gpu() -> None:
    def mask() -> torch.Tensor:
        places = torch.arange(32, device="cuda")
        causal = places[None] <= places[:, None]
        return (causal & (places + 1 > 0)).expand(8, 1, 32, 32)

    torch._dynamo.reset()
    found = torch.compile(mask, backend="tvmbridge")()
    torch.testing.assert_close(found, mask())

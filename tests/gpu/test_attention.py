"""Attention on a GPU: PyTorch's fused kernels, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.helpers import GPU, STEPS, check, pair, replays
from tvmbridge import add_tvm_dispatch, capture, dispatch_report
from tvmbridge.core.torch_private import chosen_attention

pytestmark = GPU


class Attention(nn.Module):
    """Multi-head attention; ``mask`` is the kind of the mask, such as ``"truths"`` for booleans."""

    def __init__(
        self, *, mask: str = "", causal: bool = False, groups: int = 1, size: int = 16
    ) -> None:
        super().__init__()
        self.mask, self.causal, self.groups, self.size = mask, causal, groups, size
        self.query, self.key = nn.Linear(64, 4 * size), nn.Linear(64, 4 * size // groups)
        self.value = nn.Linear(64, 4 * size // groups)
        self.bias = nn.Parameter(torch.randn(4, 19, 19)) if mask == "learned" else None
        self.p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = torch.arange(x.shape[1], device=x.device) < x.shape[1] - 3
        mask = None
        if self.mask == "truths":
            mask = seen[None, None, None]
        elif self.mask == "causal":
            places = torch.arange(x.shape[1], device=x.device)
            mask = (places[:, None] >= places)[None, None].expand(x.shape[0], -1, -1, -1)
        elif self.bias is not None:
            mask = self.bias[None]
        elif self.mask == "numbers":
            mask = torch.where(seen, 0.0, -1e4).to(x.dtype)[None, None].expand(1, 1, x.shape[1], -1)
        return self.mixed(query, key, value, mask).transpose(1, 2).flatten(2)

    def mixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, self.p, self.causal, enable_gqa=self.groups > 1
        )


class Written(Attention):
    """Attention that is written as products and a softmax."""

    def mixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        scores = query @ key.transpose(-2, -1) / 4
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -1e38)
        return functional.dropout(scores.softmax(-1), self.p) @ value


class Dropped(Attention):
    """Attention with dropout, whose value has no projection."""

    def __init__(self, *, mask: str = "") -> None:
        super().__init__(mask=mask)
        self.value = nn.Identity()
        self.p = 0.25


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"mask": "truths"},
        {"mask": "numbers"},
        {"mask": "learned"},
        {"groups": 2},
        {"groups": 2, "causal": True},
        {"size": 12, "causal": True},
        {"size": 12, "mask": "learned"},
    ],
    ids=str,
)
def test_values(options: dict[str, object], dtype: torch.dtype, train: bool) -> None:
    check(lambda: Attention(**options), (torch.randn(2, 19, 64),), dtype, train=train)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("mask", ["", "truths", "numbers", "learned"])
def test_products_and_a_softmax_are_the_kernel(mask: str, train: bool) -> None:
    check(lambda: Written(mask=mask), (torch.randn(2, 19, 64),), torch.bfloat16, train=train)
    module = Written(mask=mask).cuda().bfloat16()
    with torch.set_grad_enabled(train):
        add_tvm_dispatch(module, (torch.randn(2, 19, 64, device="cuda", dtype=torch.bfloat16),))
    names = dispatch_report(module).aten_calls
    assert any("attention" in name for name in names)
    assert not any("softmax" in name for name in names)


def test_a_layer_of_pytorch_trains_by_the_kernel() -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    check(make, (torch.randn(2, 19, 64),), torch.float32)
    tvm, _ = pair(lambda: make().bfloat16(), torch.randn(2, 19, 64).to("cuda", torch.bfloat16))
    assert "tvmbridge.fused_attention.default" in dispatch_report(tvm).aten_calls


@pytest.mark.parametrize("size", [16, 12])
def test_the_kernel_is_fused(size: int) -> None:
    x = torch.randn(2, 19, 64, device="cuda", dtype=torch.bfloat16)
    tvm, _ = pair(lambda: Attention(size=size).bfloat16(), x)
    assert "tvmbridge.fused_attention.default" in dispatch_report(tvm).aten_calls


def test_a_bias_that_trains_is_left_to_the_kernel() -> None:
    x = torch.randn(2, 19, 64, device="cuda", dtype=torch.bfloat16)
    tvm, _ = pair(lambda: Attention(mask="learned").bfloat16(), x)
    name = "tvmbridge.fused_attention_backward_with_bias.default"
    assert name in dispatch_report(tvm).aten_calls


@pytest.mark.parametrize("mask", ["", "truths"])
def test_backward_has_the_mask_of_forward(mask: str) -> None:
    # The output is linear in the value, so the derivative along the value is the output itself.
    x = torch.randn(4, 24, 64, device="cuda", dtype=torch.bfloat16)
    tvm, _ = pair(lambda: Dropped(mask=mask).bfloat16(), x.requires_grad_())
    with torch.no_grad():  # make all attention weights equal
        for part in (tvm.query, tvm.key):
            part.weight.zero_()
            part.bias.zero_()
    outputs = []
    for step in range(STEPS):
        torch.manual_seed(step // 2)
        x.grad = None
        output = tvm(x)
        output.backward(output.detach())
        assert x.grad is not None
        outputs.append(output.detach().float())
        found, expected = (x.grad.float() * x.float()).sum(), outputs[-1].square().sum()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=0.0)
    assert replays(tvm) > 0
    assert not torch.equal(outputs[-1], outputs[-3])


def test_dropout_keeps_the_mean_and_its_share() -> None:
    x = torch.ones(8, 64, 64, device="cuda", dtype=torch.float16)
    tvm, _ = pair(lambda: Dropped().half(), x.requires_grad_())
    with torch.no_grad():
        for part in (tvm.query, tvm.key):
            part.weight.zero_()
            part.bias.zero_()
    torch.manual_seed(0)
    outputs = torch.stack([tvm(x).detach().float() for _ in range(40)])
    # Each is a mean of 64 weights that are 1 / 0.75 with probability 0.75, otherwise 0.
    assert abs(float(outputs.mean()) - 1.0) < 0.01
    spread = (0.25 / 0.75 / 64) ** 0.5
    assert abs(float(outputs[..., 0].std()) / spread - 1.0) < 0.1


def test_kernels_that_are_switched_off_are_not_used() -> None:
    x = torch.randn(2, 19, 64, device="cuda", dtype=torch.bfloat16)
    tvm, _ = pair(lambda: Attention().bfloat16(), x)
    for _ in range(STEPS):
        tvm(x).sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        tvm(x).sum().backward()
    modes = [entry.mode for entry in dispatch_report(tvm).specializations]
    assert len(modes) == 2
    assert "attention without flash" in modes[1]


def test_a_causal_mask_that_is_given_is_dropped_in_training() -> None:
    module = Attention(mask="causal").cuda().bfloat16()
    x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with torch.enable_grad():
        graph = capture(module, x).program.graph
    (node,) = [n for n in graph.nodes if str(n.target) == "tvmbridge.fused_attention.default"]
    assert node.args[3] is None
    assert node.args[4] != "efficient"
    assert node.args[6] is True


class MaskGiven(nn.Module):
    """Attention whose mask is an argument."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, mask)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("closed", ["truths", "infinite", "least"])
@pytest.mark.parametrize("shape", [(19, 19), (3, 1, 1, 19), (3, 1, 19, 19), (1, 4, 19, 19)])
def test_a_mask_that_closes_a_row(shape: tuple[int, ...], closed: str) -> None:
    """The row gives zeros, or the mean if the mask is finite."""
    torch.manual_seed(0)
    seen = torch.rand(shape) < 0.7
    seen.select(-2 if shape[-2] > 1 else 0, 0).fill_(False)
    number = {"infinite": -torch.inf, "least": torch.finfo(torch.bfloat16).min}.get(closed)
    mask = seen if number is None else torch.where(seen, 0.0, number).bfloat16()
    x = torch.randn(3, 19, 64).bfloat16()
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        module, given = MaskGiven(), x.to(device, dtype, copy=True).requires_grad_()
        used = mask.to(device, torch.bool if number is None else dtype)
        if device == "cuda":
            add_tvm_dispatch(module, (given, used))
        for _ in range(STEPS):
            given.grad = None
            output = module(given, used)
            output.square().sum().backward()
        assert given.grad is not None
        results.append([output.detach().double().cpu(), given.grad.double().cpu()])
        if device == "cuda":
            assert replays(module) > 0
    for found, expected in zip(*results, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-2


def test_cudnn_takes_a_mask_if_pytorch_would_use_it() -> None:
    x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()
    heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
    if chosen_attention(heads, heads, heads, mask) != SDPBackend.CUDNN_ATTENTION.value:
        pytest.skip("PyTorch does not use cuDNN here")
    graph = capture(MaskGiven(), (x, mask)).program.graph
    (node,) = [n for n in graph.nodes if str(n.target) == "tvmbridge.fused_attention.default"]
    assert node.args[4] == "cudnn"

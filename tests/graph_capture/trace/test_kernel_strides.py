"""Results of fake tensors have the strides that PyTorch's kernels give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from tests.frontend.helpers import Function
from tests.thinned import covering
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.trace import kernel_strides
from tvmbridge.graph_capture.trace.kernel_strides import strides_of_kernels

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "batch norm in training": lambda x: functional.batch_norm(x, None, None, training=True),
    "batch norm": lambda x: functional.batch_norm(
        x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    ),
    "copysign": lambda x: torch.copysign(x, -2.0),
    "floor division": lambda x: x // 2.0,
    "rounded division": lambda x: torch.div(x, 2.0, rounding_mode="trunc"),
    "product": lambda x: x * 2.0,
    "channels shuffled": lambda x: functional.channel_shuffle(x, 2),
    "reflected": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicated": lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "logical": lambda x: torch.logical_xor(x[:1], x),
    "logarithm of exponentials": lambda x: torch.logaddexp(x, x[:1]),
    "unpooled": lambda x: functional.max_unpool2d(
        *functional.max_pool2d(x, 2, return_indices=True), 2
    ),
    "relu": functional.relu,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "number less": lambda x: 1.0 - x,
    "square": lambda x: x**2,
    "sum of two": lambda x: x + x.clone(),
    "bounded by a tensor": lambda x: x.clamp(None, x.clone()),
    "copy": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_are_those_of_the_kernels(name: str) -> None:
    base = torch.randn(4, 4, 4, 4).add(2)
    orders = [(0, 1, 2, 3), (0, 3, 1, 2), (3, 1, 2, 0), (1, 0, 2, 3)]
    for x in [base.permute(order) for order in orders] + [base[0].transpose(0, 2)]:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, strides_of_kernels():
            fake = FUNCTIONS[name](mode.from_tensor(x))
        assert fake.stride() == FUNCTIONS[name](x).stride()


# Functions that reject images of one pixel or of one channel.
LARGER = {"channels shuffled", "reflected", "unpooled"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - LARGER))
@pytest.mark.parametrize("shape", [(2, 8, 1, 1), (2, 1, 4, 4), (1, 8, 1, 1)])
def test_strides_that_fit_both_formats(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).add(2).to(memory_format=torch.channels_last)
    x = torch.cat([x, x])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, strides_of_kernels():
        fake = FUNCTIONS[name](mode.from_tensor(x))
    assert fake.stride() == FUNCTIONS[name](x).stride()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.ReLU()])
def test_a_pooled_pixel_is_spread_as_in_eager(norm: nn.Module) -> None:
    spread = nn.Upsample(scale_factor=4, mode="bilinear")
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), norm, spread, nn.ReLU())
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    add_tvm_dispatch(model, x)
    result, expected = model(x), reference(x)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


def test_forward_is_told_the_strides_of_the_kernels() -> None:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        shuffled = FUNCTIONS["channels shuffled"](x.contiguous(memory_format=torch.channels_last))
        normed = FUNCTIONS["batch norm in training"](x[0].mT * 1)
        return [x * shuffled.is_contiguous() + 1, x * normed.stride(1)]

    x = torch.randn(2, 4, 4, 4)
    ours = add_tvm_dispatch(Function(forward), x)
    torch.testing.assert_close(ours(x), forward(x))
    assert not dispatch_report(ours).fallbacks


def quantiles(x: torch.Tensor) -> torch.Tensor:
    return x.quantile(torch.tensor([0.2, 0.4], dtype=x.dtype), dim=1)


def heads(x: torch.Tensor) -> torch.Tensor:
    """Attention of a single token, whose heads are next to each other in memory."""
    heads = (x[:, :1] * 1).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize("function", [quantiles, heads])
@pytest.mark.parametrize("door", ["add", "compile"])
def test_strides_of_functions_that_no_fake_kernel_knows(
    function: Callable[[torch.Tensor], torch.Tensor], door: str
) -> None:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        result = function(x * 2)
        return [result, x * result.stride(0), x * result.stride(-2)]

    x = torch.randn(2, 4, 4, 6, dtype=torch.float64)
    state = torch.get_rng_state()
    torch._dynamo.reset()
    ours: Any = Function(forward).eval()
    ours = add_tvm_dispatch(ours, x) if door == "add" else torch.compile(ours, backend="tvmbridge")
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(ours(x), forward(x))


def test_shapes_that_depend_on_values_are_left_as_they_are() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode, strides_of_kernels():
        rows = torch.nonzero(mode.from_tensor(torch.ones(4)))
        assert isinstance((rows + rows).shape[0], torch.SymInt)


class Rolled(nn.Module):
    """Branches on the memory format of a rolled tensor, or reads its memory by ``as_strided``."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layer = nn.Conv2d(5, 5, 1)
        self.asks = asks
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.roll(x, 1, 0)
        if not self.asks:
            return y.as_strided((2, 3), (4, 1), 1) * self.layer.bias[0]
        if y.is_contiguous(memory_format=torch.channels_last):
            return self.layer(y)
        return self.layer(y) * 0


@pytest.mark.parametrize(
    ("asks", "door", "layout"),
    covering([True, False], ["add", "compile"], [torch.channels_last, torch.contiguous_format]),
)
def test_forward_branches_on_strides_as_in_eager(
    asks: bool, door: str, layout: torch.memory_format
) -> None:
    reference = Rolled(asks).eval()
    x = torch.randn(2, 5, 2, 5, dtype=torch.float64).to(memory_format=layout)
    ours: Any = copy.deepcopy(reference)
    if door == "add":
        add_tvm_dispatch(ours, x)
    else:
        torch._dynamo.reset()
        ours = torch.compile(ours, backend="tvmbridge")
    with torch.no_grad():
        torch.testing.assert_close(ours(x), reference(x))
    if door == "add":
        assert not dispatch_report(ours).fallbacks


@pytest.mark.parametrize("asks", [True, False])
def test_strides_in_code_of_torch_compile_for_any_size(asks: bool) -> None:
    torch._dynamo.reset()
    reference = Rolled(asks).eval()
    ours = torch.compile(copy.deepcopy(reference), backend="tvmbridge", dynamic=True)
    for rows in (2, 3):
        x = torch.randn(rows, 5, 2, 5, dtype=torch.float64)
        x = x.to(memory_format=torch.channels_last)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), reference(x))


class Pooled(nn.Module):
    """Branches on the strides of a pooled transpose; eager PyTorch has a kernel for inference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.max_pool1d(x.mT * 2, 2)
        return y * 3 if y.is_contiguous() else y - 1


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("door", ["add", "compile"])
def test_strides_of_a_kernel_that_fake_tensors_do_not_reach(records: bool, door: str) -> None:
    x, reference = torch.randn(2, 8, 3).requires_grad_(records), Pooled()
    ours: Any = Pooled()
    if door == "add":
        add_tvm_dispatch(ours, x)
    else:
        torch._dynamo.reset()
        ours = torch.compile(ours, backend="tvmbridge")
    with torch.set_grad_enabled(records):
        torch.testing.assert_close(ours(x), reference(x), rtol=0, atol=0)
    if door == "add":
        assert not dispatch_report(ours).fallbacks


@pytest.mark.parametrize("asks", [True, False])
def test_strides_in_training(asks: bool) -> None:
    reference = Rolled(asks)
    x = torch.randn(2, 5, 2, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    ours = copy.deepcopy(reference)
    add_tvm_dispatch(ours, x)
    ours(x).square().sum().backward()
    reference(x).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    "taken",
    [
        lambda y: y[1:].as_strided((2, 3), (4, 1)),
        lambda y: (y.as_strided((2, 3), (4, 1)).add_(1), y)[1],
        lambda y: torch.as_strided_scatter(y, y[0, 0, 0, :2] * 3, (2,), (3,)),
    ],
)
def test_memory_that_compiled_code_has_otherwise_is_refused(
    taken: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(2, 5, 2, 5).to(memory_format=torch.channels_last)
    with pytest.raises(BridgeError, match="depends on the strides of its input"):
        add_tvm_dispatch(Function(lambda x: taken(torch.roll(x, 1, 0)) * 2), x)


def test_strides_that_no_kernel_tells_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_strides, "_MOST_ELEMENTS", 8)
    x = torch.randn(2, 5, 2, 5).to(memory_format=torch.channels_last)
    with pytest.raises(BridgeError, match=r"strides behind aten\.roll\.default"):
        add_tvm_dispatch(Function(lambda x: x * torch.roll(x, 1, 0).stride(1)), x)


def test_strides_of_views_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_strides, "_MOST_ELEMENTS", 8)

    def chunks(x: torch.Tensor) -> torch.Tensor:
        x = (x + 1).permute(0, 2, 1).unsqueeze(1)
        size, stride = list(x.shape), list(x.stride())
        size[3], stride[3] = 2, stride[3] * 3
        return x.as_strided(size, stride).transpose(1, 2) * 2

    x = torch.randn(2, 9, 5)
    module = Function(chunks)
    add_tvm_dispatch(module, x)
    assert torch.equal(module(x), chunks(x))
    assert dispatch_report(module).tvm_calls == 1


def test_strides_of_an_argument_out_that_is_resized_are_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.add(x, x, out=torch.empty(0)).stride(1)

    x = torch.randn(2, 5, 2, 5).to(memory_format=torch.channels_last)
    with pytest.raises(BridgeError, match=r"strides behind aten\.add\.out"):
        add_tvm_dispatch(Function(forward), x)


def test_no_kernel_that_is_asked_draws_numbers() -> None:
    x = torch.randn(2, 3, 4).mT
    before = torch.get_rng_state()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, strides_of_kernels():
        fake = torch.normal(mode.from_tensor(x), mode.from_tensor(x.abs()))
    assert torch.equal(torch.get_rng_state(), before)
    assert fake.stride() == torch.normal(x, x.abs()).stride()

"""FewChannelGradients: the gradients of images that another kernel computes, and its results."""

from __future__ import annotations

import pytest
import torch
import tvm
from torch.nn import functional
from tvm import relax

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
)
from tvmbridge.kernels import few_channels
from tvmbridge.kernels.aten_call import spec_of
from tvmbridge.kernels.convolution import Convolution
from tvmbridge.kernels.few_channels import DataGradient
from tvmbridge.passes.relax.few_channel_gradients import FewChannelGradients

MEASURED = FewChannelGradients(measure=True)


def operands(
    channels: int, stride: int, padding: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return a cotangent, an image and a weight; image and weight are taller than wide."""
    torch.manual_seed(0)
    x, w = torch.randn(2, channels, 11, 8, dtype=dtype), torch.randn(6, channels, 3, 2, dtype=dtype)
    return [torch.randn_like(functional.conv2d(x, w, None, stride, padding)), x, w]


def gradient(tensors: list[torch.Tensor], *sizes: int, position: int = 0) -> tvm.IRModule:
    """Return ``main`` with a convolution's gradient.

    ``sizes`` are the stride, the padding, the dilation and the groups.
    """
    stride, padding, dilation, groups = (*sizes, 1, 1)[:4]
    pairs = (stride, stride), (padding, padding), (dilation, dilation)
    convolution = Convolution(*pairs, False, (0, 0), groups)

    def formula(*given: relax.Expr) -> relax.Expr:
        return relax.TupleGetItem(convolution.gradient_call(*given, position), 0)

    return build_main(tensors, formula)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pass believe that the other kernel is always faster."""
    monkeypatch.setattr(few_channels, "_is_faster", lambda gradient: True)


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (3, 0)])
def test_the_gradient_is_that_of_float64(stride: int, padding: int) -> None:
    tensors = operands(3, stride, padding)
    mod = gradient(tensors, stride, padding)
    after, report = apply_pass(MEASURED, mod)
    assert report.rewrites == 1
    x = tensors[1].double().requires_grad_()
    functional.conv2d(x, tensors[2].double(), None, stride, padding).backward(tensors[0].double())
    assert x.grad is not None
    found, usual = (compile_and_run(m, *tensors)[0].double() for m in (after, mod))
    # The tolerance fits sums of at most 6 x 6 products of numbers around 1.
    torch.testing.assert_close(found, x.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(usual, x.grad, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("faster")
def test_the_spec_names_the_other_kernel() -> None:
    after, _ = apply_pass(MEASURED, gradient(operands(3, 2, 1), 2, 1))
    call = after["main"].body.blocks[0].bindings[0].value
    assert spec_of(call) == {
        "op": "aten._slow_conv2d_backward.output_mask",
        "args": [
            *({"tensor": i} for i in range(3)),
            [3, 2],
            [2, 2],
            [1, 1],
            [True, False, False],
        ],
        "kwargs": {},
        "results": [0],
    }
    assert_changes_nothing(MEASURED, after)


@pytest.mark.usefixtures("faster")
def test_others_stay() -> None:
    small = operands(3, 1, 0)
    assert_changes_nothing(FewChannelGradients(), gradient(small, 1, 0))
    report = assert_changes_nothing(MEASURED, gradient(operands(16, 1, 0), 1, 0))
    assert "not known to be faster" in str(report.declined)
    assert_changes_nothing(MEASURED, gradient(small, 1, 0, position=1))
    double = operands(3, 1, 0, torch.float64)
    assert_changes_nothing(MEASURED, gradient(double, 1, 0))
    assert_changes_nothing(MEASURED, gradient(small, 1, 0, 2))
    assert_changes_nothing(MEASURED, gradient([small[0], small[1], small[2][:, :1]], 1, 0, 1, 3))


@pytest.mark.parametrize(("times", "expected"), [([3.0, 2.0], "product"), ([3.0, 2.9], "")])
def test_the_choice_follows_times(
    times: list[float], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_channels, "race", lambda candidates: times)
    shapes = (tuple(tensor.shape) for tensor in operands(3, 2, 1))
    assert few_channels._faster(DataGradient(*shapes, (2, 2), (1, 1))) == expected


def test_the_choice_follows_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_channels, "race", lambda candidates: [3.0, 1.0])
    exact = DataGradient.by_product

    def rounded(self: DataGradient, tensors: list[torch.Tensor]) -> torch.Tensor:
        return exact(self, [t.bfloat16().float() for t in tensors])

    monkeypatch.setattr(DataGradient, "by_product", rounded)
    shapes = (tuple(tensor.shape) for tensor in operands(3, 2, 1))
    assert few_channels._faster(DataGradient(*shapes, (2, 2), (1, 1))) == ""

"""SlicedGradients: which gradients read a slice, and the same results."""

from __future__ import annotations

import pytest
import torch
import tvm
from torch.nn import functional
from tvm import relax

from tests.relax_helpers import apply_pass, assert_changes_nothing, build_main, compile_and_run
from tvmbridge.kernels.convolution import Convolution
from tvmbridge.passes.relax.sliced_gradients import SlicedGradients


def _operands(channels: int, kernel: int, stride: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, channels, 11, 8)
    w = torch.randn(6, channels, kernel, kernel)
    return [torch.randn_like(functional.conv2d(x, w, None, stride)), x, w]


def _gradient(
    tensors: list[torch.Tensor], stride: tuple[int, ...], position: int = 1
) -> tvm.IRModule:
    convolution = Convolution(stride, (0, 0), (1, 1), False, (0, 0), 1)

    def formula(*given: relax.Expr) -> relax.Expr:
        return relax.TupleGetItem(convolution.gradient_call(*given, position), 0)

    return build_main(tensors, formula)


@pytest.mark.parametrize("stride", [(2, 2), (3, 1)])
def test_the_gradient_of_a_weight(stride: tuple[int, ...]) -> None:
    tensors = _operands(8, 1, stride)
    after, report = apply_pass(SlicedGradients(), _gradient(tensors, stride))
    assert report.rewrites == 1
    assert "strided_slice" in after.script()
    (found,) = compile_and_run(after, *tensors)
    x, w = tensors[1].double(), tensors[2].double().requires_grad_()
    functional.conv2d(x, w, None, stride).backward(tensors[0].double())
    assert w.grad is not None
    torch.testing.assert_close(found, w.grad.float())


def test_the_gradient_of_a_transposed_convolutions_weight() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 6, 5, 4), torch.randn(6, 8, 1, 1)
    stride, more = (2, 3), (1, 2)
    cotangent = torch.randn_like(functional.conv_transpose2d(x, w, None, stride, 0, more))
    convolution = Convolution(stride, (0, 0), (1, 1), True, more, 1)

    def formula(*given: relax.Expr) -> relax.Expr:
        return relax.TupleGetItem(convolution.gradient_call(*given, 1), 0)

    tensors = [cotangent, x, w]
    after, report = apply_pass(SlicedGradients(), build_main(tensors, formula))
    assert report.rewrites == 1
    (found,) = compile_and_run(after, *tensors)
    exact = w.double().requires_grad_()
    functional.conv_transpose2d(x.double(), exact, None, stride, 0, more).backward(
        cotangent.double()
    )
    assert exact.grad is not None
    torch.testing.assert_close(found, exact.grad.float())


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "position"),
    [(16, 1, (2, 2), 1), (8, 1, (1, 1), 1), (8, 3, (2, 2), 1), (8, 1, (2, 2), 0)],
    ids=["a block of channels", "no stride", "not pointwise", "of the data"],
)
def test_what_stays(channels: int, kernel: int, stride: tuple[int, ...], position: int) -> None:
    tensors = _operands(channels, kernel, stride)
    assert_changes_nothing(SlicedGradients(), _gradient(tensors, stride, position))

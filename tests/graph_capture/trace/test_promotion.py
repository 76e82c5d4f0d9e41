"""Operators on several dtypes return the dtypes that PyTorch's kernels return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import tvmbridge
from tests.frontend.helpers import Function, assert_like_eager
from tvmbridge.graph_capture.trace.promotion import kernel_dtypes

X, TARGET = torch.linspace(-3, 3, 12).reshape(3, 4), torch.ones(3, 4, dtype=torch.float64)
aten = torch.ops.aten


def test_losses_keep_the_dtype_of_the_input() -> None:
    """PyTorch's fake kernels and decompositions of losses and scatters promote; kernels do not."""

    def losses(x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        return [
            functional.huber_loss(x, target),
            functional.binary_cross_entropy_with_logits(x, target),
            functional.binary_cross_entropy_with_logits(target, x, reduction="none"),
            functional.huber_loss(x, target, reduction="none", delta=0.5),
            functional.soft_margin_loss(x, target, reduction="sum"),
            x.select_scatter(target[0], 0, 1),
        ]

    assert_like_eager(losses, X, TARGET)
    assert_like_eager(losses, X.bfloat16(), TARGET.float())


def test_draws_keep_the_dtype_of_the_mean() -> None:
    """Random draws have eager PyTorch's dtype and numbers."""

    def draw(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.normal(x, target)

    assert draw(X, TARGET).dtype is torch.float32
    module = Function(lambda x, target: torch.normal(x, std=target)).eval()
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (X, TARGET))
        torch.manual_seed(0)
        torch.testing.assert_close(module(X, TARGET), draw(X, TARGET))
        assert_like_eager(
            lambda x, n: torch.normal(x, n) * 0, X.bfloat16(), torch.ones(3, 4, dtype=torch.int32)
        )
    assert tvmbridge.dispatch_report(module).tvm_calls == 1


def test_half_precision_overflows_where_eager_does() -> None:
    """Eager PyTorch rounds between the steps of soft_margin_loss, but not of mse_loss."""

    def results(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        each = functional.mse_loss(x / 3, target, reduction="none")
        return functional.soft_margin_loss(x, target), each, torch.xlogy(target, 1e10), 1e10**target

    large, target = torch.tensor([-20.0, 2.0]).half(), torch.ones(2).half()
    assert torch.isinf(functional.soft_margin_loss(large, target))
    assert_like_eager(results, large, target)


def test_a_kernel_with_another_dtype_than_the_trace_is_refused() -> None:
    """An operator called past the patched functions is refused by name."""
    module = Function(lambda x, y: torch._C._nn.huber_loss(x, y, 0, 1.0) + 1).eval()
    with torch.no_grad(), pytest.raises(tvmbridge.BridgeError, match=r"float(32|64)"):
        tvmbridge.add_tvm_dispatch(module, (X, TARGET))


def test_kernels_are_asked_only_where_they_promote() -> None:
    """``kernel_dtypes`` returns None for one dtype, and for draws, which change the generator."""
    half = X.half()
    assert kernel_dtypes(aten.mul.Tensor, (X, X), {}) is None
    assert kernel_dtypes(aten.where.self, (X > 0, X, X), {}) is None
    assert kernel_dtypes(aten.mul.Tensor, (half, TARGET), {}) == [torch.float64]
    assert kernel_dtypes(aten.huber_loss.default, (half, X), {}) == [torch.float16]
    state = torch.get_rng_state()
    assert kernel_dtypes(aten.normal.Tensor_Tensor, (half, X.abs()), {}) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_between_integers_are_truncated_as_in_eager() -> None:
    """Integer ``linspace`` truncates as eager PyTorch does, which depends on its rounding."""
    assert_like_eager(
        lambda x: (
            x + torch.linspace(4.3, 1, 50, dtype=torch.int64),
            x + torch.linspace(0, 7, 50, dtype=torch.int64),
            torch.linspace(x[0], 7, 50, dtype=torch.int64),
        ),
        torch.zeros(50, dtype=torch.int64),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_kernels_that_take_indices_for_dense_are_asked_on_dense_ones(dtype: torch.dtype) -> None:
    pooled = torch.randn(8, 6, 6, 6).to(dtype)
    x = torch.randn(8, 12, 12, 12).to(dtype)
    places = torch.empty(pooled.shape, dtype=torch.int64, device="meta")
    op = torch.ops.aten.adaptive_max_pool3d_backward.default
    for _ in range(20):
        assert kernel_dtypes(op, (pooled, x, places), {}) == [dtype]


def test_kernels_are_asked_on_expanded_zeros_where_the_trace_has_an_expanded_tensor() -> None:
    """A tensor of 4 TB, which is one number expanded, takes no memory."""
    x = torch.empty(1, device="meta").expand(1 << 40)
    places = torch.empty(3, dtype=torch.int64, device="meta")
    assert kernel_dtypes(aten.index.Tensor, (x, [places]), {}) == [torch.float32]
    assert kernel_dtypes(aten.gather.default, (x, 0, places), {}) == [torch.float32]


@pytest.mark.parametrize(
    "read",
    [
        lambda x, i: x.expand(1 << 40, 3)[i] * 2,
        lambda x, i: functional.embedding(i, x.expand(1 << 40, 3), padding_idx=5) * 2,
    ],
    ids=["index", "embedding"],
)
def test_reads_of_an_expanded_tensor_make_no_tensor_of_its_size(read: Any) -> None:
    module = Function(read).eval()
    x, i = torch.randn(1, 3), torch.tensor([0, (1 << 40) - 1, 5])
    expected = module(x, i)
    tvmbridge.add_tvm_dispatch(module, (x, i))
    assert torch.equal(module(x, i), expected)
    assert tvmbridge.dispatch_report(module).tvm_calls == 1
    with pytest.raises(IndexError, match="out of bounds"):
        module(x, i + 1)

"""Code for any size serves sizes of 1 if forward does the same with them as with others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.random_sizes.attention_forms import Cached, Sliding
from tests.random_sizes.compilations import Compilations
from tvmbridge import add_tvm_dispatch, dispatch_report


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    log, counted = logging.getLogger("tvmbridge"), Compilations()
    before = log.level
    log.addHandler(counted)
    log.setLevel(logging.INFO)
    yield counted
    log.setLevel(before)
    log.removeHandler(counted)


def _all_right(module: nn.Module, calls: Sequence[tuple[torch.Tensor, ...]]) -> None:
    """Call the module through TVM and in eager PyTorch; all calls must be served, and right."""
    expected = [module(*given) for given in calls]
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    for given, one in zip(calls, expected, strict=True):
        torch.testing.assert_close(module(*given), one, rtol=1e-4, atol=1e-5)
    report = dispatch_report(module)
    assert report.tvm_calls == len(calls), report.fallbacks


class _Mixed(nn.Module):
    """Rows, and means over all columns, which may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) - x.softmax(1)


class _Squeezed(nn.Module):
    """A forward that does something else for one row, and for one column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return x.exp() * 3
        return x.squeeze(1) * 2 if x.shape[1] == 1 else x.softmax(1)


@torch.no_grad()
def test_sizes_of_one_need_no_code_of_their_own(compilations: Compilations) -> None:
    torch.manual_seed(0)
    sizes = ((20, 40), (24, 50), (1, 40), (30, 1), (1, 1), (2, 3), (1, 7))
    _all_right(_Mixed().eval(), [(torch.randn(*size, 8),) for size in sizes])
    # For the first call, for common sizes, and for columns that are fewer than a vector's lanes.
    assert compilations.done <= 3
    assert not compilations.failed


@torch.no_grad()
def test_a_forward_that_branches_at_one_has_code_of_its_own_there() -> None:
    torch.manual_seed(0)
    sizes = ((5, 6), (7, 9), (1, 6), (5, 1), (1, 1))
    _all_right(_Squeezed().eval(), [(torch.randn(*size, 4),) for size in sizes])


@torch.no_grad()
def test_a_constant_mask_that_is_neither_open_nor_causal_has_any_size(
    compilations: Compilations,
) -> None:
    torch.manual_seed(0)
    sizes = ((2, 5), (3, 9), (4, 12))
    _all_right(Sliding().eval(), [(torch.randn(*size, 8),) for size in sizes])
    assert compilations.done == 2


@torch.no_grad()
def test_a_permuted_argument_has_no_symbols_for_strides(compilations: Compilations) -> None:
    torch.manual_seed(0)
    calls = []
    for batch, cached in ((3, 4), (5, 6), (5, 7)):
        caches = (torch.randn(batch, cached, 2, 4).transpose(1, 2) for _ in range(2))
        calls.append((torch.randn(batch, 1, 8), *caches))
    _all_right(Cached().eval(), calls)
    assert compilations.done == 2


class _Limited(nn.Module):
    """A forward with a minimum and a maximum of a size and a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = min(5, x.shape[1])
        return x[:, :columns].sum(1) / columns + max(7, x.shape[1])


@torch.no_grad()
def test_small_sizes_at_which_a_minimum_is_another_one_have_other_code() -> None:
    torch.manual_seed(0)
    sizes = ((2, 9), (2, 12), (1, 3), (2, 4), (2, 6))
    _all_right(_Limited(), [(torch.randn(*size),) for size in sizes])


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0])


@pytest.mark.slow
def test_a_recurrent_network_in_training_has_one_code_for_one_step_and_one_row(
    compilations: Compilations,
) -> None:
    torch.manual_seed(0)
    sizes = ((3, 5), (4, 7), (1, 7), (4, 1), (1, 1))
    _all_right(_Recurrent(), [(torch.randn(*size, 4),) for size in sizes])
    assert compilations.done == 2


class _NextToken(nn.Module):
    """Scores of the next tokens: forward leaves out the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.words(ids))[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


class _OtherAtOneLeft(nn.Module):
    """A forward that does something else where one position is left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, 1:]
        return x.exp() * 3 if x.shape[1] == 1 else x.softmax(1)


@torch.no_grad()
def test_two_positions_of_which_one_is_left_need_no_code_of_their_own(
    compilations: Compilations,
) -> None:
    torch.manual_seed(0)
    sizes = ((4, 20), (6, 33), (4, 2), (1, 2), (7, 2), (2, 5))
    _all_right(_NextToken(), [(torch.randint(0, 9, size),) for size in sizes])
    # For the first call, for common sizes, and for small ones.
    assert compilations.done <= 3


@torch.no_grad()
def test_a_forward_that_branches_at_one_position_left_is_right() -> None:
    torch.manual_seed(0)
    sizes = ((5, 6), (7, 9), (4, 3), (5, 2), (2, 2), (3, 2))
    _all_right(_OtherAtOneLeft(), [(torch.randn(*size, 4),) for size in sizes])


@torch.no_grad()
def test_images_of_one_patch_do_not_limit_the_code_for_more(compilations: Compilations) -> None:
    torch.manual_seed(0)
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.Softmax(2))
    sizes = ((2, 20, 24), (3, 4, 12), (2, 16, 28), (5, 40, 8), (3, 24, 36))
    _all_right(patches, [(torch.randn(b, 3, h, w),) for b, h, w in sizes])
    # For the first call, for one row of patches, and for more rows.
    assert compilations.done <= 3

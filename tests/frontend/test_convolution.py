"""All forms of convolutions become Relax convolutions and compute what eager PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.frontend.helpers import Together, assert_like_eager
from tests.thinned import thinned

GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


LINE, IMAGE, VOLUME = numbers(2, 4, 9), numbers(2, 4, 9, 8), numbers(2, 4, 5, 6, 7)
WEIGHTS = numbers(6, 2, 3), numbers(6, 2, 3, 4), numbers(6, 2, 2, 3, 2)
BIAS = numbers(6)

PLAIN: tuple[Callable[..., Any], ...] = (
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
)
TRANSPOSED: tuple[Callable[..., Any], ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the results of all forms of the convolution for the number of dimensions of ``x``."""
    rank = w.dim() - 2
    convolution = PLAIN[rank - 1]
    bare = convolution(x, w, groups=2)
    return (
        bare,
        bare + b[0],
        convolution(x, w, b, groups=2),
        torch.tanh(convolution(x, w, b, 2, 1, groups=2)),
        convolution(x, w, b, (2, 1, 3)[:rank], (0, 2, 1)[:rank], (1, 2, 1)[:rank], 2),
        convolution(x, w, b, padding="same", groups=2),
        convolution(x, w, b, padding="valid", groups=2),
        convolution(x[1], w, b, groups=2),
        convolution(x[:, :2], w, -b),
    )


def transposed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the results of all forms of the transposed convolution for the dimensions of ``x``."""
    rank = w.dim() - 2
    convolution = TRANSPOSED[rank - 1]
    w = w[:4]
    return (
        convolution(x, w),
        convolution(x, w, b[:4], 2, 1, 1, groups=2),
        convolution(x, w, b[:4], (2, 3, 1)[:rank], (0, 1, 1)[:rank], (1, 2, 0)[:rank], groups=2),
        convolution(x[0], w, b[:2], dilation=2),
    )


CASES = {
    f"{form.__name__} {rank}d": (form, (x, weight, BIAS))
    for form in (plain, transposed)
    for rank, (x, weight) in enumerate(zip((LINE, IMAGE, VOLUME), WEIGHTS, strict=True), start=1)
}
TOGETHER = Together(CASES)


@pytest.mark.parametrize("name", thinned(CASES, 2))
def test_every_form(name: str) -> None:
    TOGETHER.assert_like_eager(name)
    assert TOGETHER.report is not None
    assert set(TOGETHER.report.aten_calls) <= {"aten.constant_pad_nd.default"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        up = functional.conv_transpose2d(x, w[:4], b[:2])
        return functional.conv2d(x, w, b, groups=2), up

    report = assert_like_eager(function, *(t.to(dtype) for t in (IMAGE, WEIGHTS[1], BIAS)))
    assert not report.aten_calls


def test_what_relax_does_not_take_is_a_call() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.conv_transpose1d(x, w[:4], output_padding=1, dilation=2)

    report = assert_like_eager(function, LINE, WEIGHTS[0])
    assert report.aten_calls == ["aten.convolution.default"]


def test_no_pictures() -> None:
    report = assert_like_eager(functional.conv1d, LINE[:0], numbers(6, 4, 3), BIAS)
    assert report.aten_calls == ["aten.conv1d.default"]


def test_integers_are_a_call() -> None:
    x, w = (t.mul(4).to(torch.int64) for t in (LINE, WEIGHTS[0]))
    report = assert_like_eager(lambda x, w: functional.conv1d(x, w, groups=2), x, w)
    assert report.aten_calls == ["aten.conv1d.default"]

"""3x3 convolutions in loops: as accurate as PyTorch's, for odd sizes too, without stray writes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from tests.convolution_helpers import by_definition
from tests.thinned import thinned
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.schedules.alone import convolution
from tvmbridge.schedules.winograd import pairs_of_block
from tvmbridge.schedules.winograd_rows import Pairs

# Batch, channels, filters, height, width. The sizes have partial chunks and panels of channels, odd
# heights, narrow and wide images, and fewer pairs of rows than cores.
SIZES = [
    (1, 8, 8, 1, 4),
    (2, 40, 16, 7, 5),
    (3, 33, 40, 6, 17),
    (1, 64, 24, 13, 70),
    (2, 72, 56, 3, 33),
]
GUARD = 1234.5


def _forms(size: tuple[int, ...]) -> list[SameConvolution]:
    forms = [SameConvolution(part, *size) for part in ConvolutionResult]
    return [*forms, SameConvolution(ConvolutionResult.RESULT, *size, biased=True)]


# Each size is in a quick case, and each of the four results.
@pytest.mark.parametrize(("place", "size"), thinned(product(range(4), SIZES), 3), ids=str)
def test_equals_the_convolution_in_float64(size: tuple[int, ...], place: int) -> None:
    form = _forms(size)[place]
    run = convolution(form)
    if run is None:
        few = form.part is ConvolutionResult.WEIGHT and form.channels < 32
        assert few or (form.part is ConvolutionResult.DATA and form.channels == 33)
        return
    torch.manual_seed(0)
    operands = [torch.randn(shape) for shape in form.shapes[:-1]]
    room = torch.full((math.prod(form.shapes[-1]) + 128,), GUARD)
    result = room[64:-64].view(form.shapes[-1])
    run(*operands, result)
    exact = by_definition(form, [t.double() for t in operands])
    usual = by_definition(form, operands)
    rounding = exact.abs().max() * torch.finfo(torch.float32).eps
    allowed = 2 * max((usual - exact).abs().max(), rounding)
    assert (result.double() - exact).abs().max() <= allowed
    assert (room[:64] == GUARD).all()
    assert (room[-64:] == GUARD).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", range(3), ids=["result", "data", "weight"])
def test_what_is_not_finite_stays_where_it_is_read(place: int, value: float) -> None:
    form = _forms((2, 40, 40, 8, 20))[place]
    run = convolution(form)
    assert run is not None
    operands = [torch.rand(shape) + 0.5 for shape in form.shapes[:-1]]
    operands[0][1, 3, 5, 7] = value
    result = torch.empty(form.shapes[-1])
    run(*operands, result)
    expected = by_definition(form, operands)
    finite = expected.isfinite()
    assert not finite.all()
    torch.testing.assert_close(result[finite], expected[finite], rtol=1e-4, atol=1e-4)
    assert not result[~finite].isfinite().any()


def test_what_there_are_no_loops_for() -> None:
    narrow, few = (2, 16, 16, 8, 3), (2, 4, 16, 8, 8)
    assert all(convolution(form) is None for form in [*_forms(narrow), *_forms(few)])
    odd = SameConvolution(ConvolutionResult.RESULT, 2, 16, 19, 8, 8)
    assert convolution(odd) is None


def test_all_cores_have_as_many_blocks() -> None:
    for cores in (1, 2, 16):
        pairs = Pairs(SameConvolution(ConvolutionResult.RESULT, 4, 64, 64, 56, 56), 16)
        size = pairs_of_block(pairs, 64, 32, cores)
        assert -(-pairs.count // size) % cores == 0

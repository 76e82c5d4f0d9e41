"""3x3 convolutions in loops: the calls that they support, and their choice by measurement."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.convolution_helpers import by_definition
from tvmbridge.kernels import convolution_loops
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.kernels.convolution_loops import BACKWARD, FORWARD, faster_in_loops, form_of
from tvmbridge.schedules.alone import convolution

SAME: list[Any] = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
DATA, WEIGHT, BIAS = (2, 16, 9, 12), (24, 16, 3, 3), (24,)
RESULT = (2, 24, 9, 12)
TENSORS = [{"tensor": i} for i in range(3)]
SIZE = (2, 16, 24, 9, 12)


def _spec(op: str, *arguments: Any, results: tuple[int, ...] = ()) -> str:
    return json.dumps({"op": op, "args": arguments, "kwargs": {}, "results": results})


def test_calls_of_convolutions() -> None:
    assert form_of(_spec(FORWARD, *TENSORS, *SAME), [DATA, WEIGHT, BIAS]) == (
        SameConvolution(ConvolutionResult.RESULT, *SIZE, biased=True),
        [0, 1, 2],
    )
    assert form_of(_spec(FORWARD, *TENSORS[:2], None, *SAME), [DATA, WEIGHT]) == (
        SameConvolution(ConvolutionResult.RESULT, *SIZE),
        [0, 1],
    )


@pytest.mark.parametrize(
    ("place", "part"), [(0, ConvolutionResult.DATA), (1, ConvolutionResult.WEIGHT)]
)
def test_calls_of_gradients(place: int, part: ConvolutionResult) -> None:
    mask = [place == i for i in range(3)]
    spec = _spec(BACKWARD, *TENSORS, None, *SAME, mask, results=(place,))
    found = form_of(spec, [RESULT, DATA, WEIGHT])
    assert found == (SameConvolution(part, *SIZE), [0, 2 - place])
    wide = (24, 16, 3, 5)
    assert form_of(spec, [RESULT, DATA, wide]) is None
    both = _spec(BACKWARD, *TENSORS, None, *SAME, [True, True, False], results=(place,))
    assert form_of(both, [RESULT, DATA, WEIGHT]) is None


@pytest.mark.parametrize("place", range(6))
def test_other_settings(place: int) -> None:
    others = [[2, 2], [0, 0], [2, 2], True, [1, 1], 2]
    settings = [*SAME[:place], others[place], *SAME[place + 1 :]]
    assert form_of(_spec(FORWARD, *TENSORS, *settings), [DATA, WEIGHT, BIAS]) is None
    gradient = _spec(BACKWARD, *TENSORS, None, *settings, [True, False, False], results=(0,))
    assert form_of(gradient, [RESULT, DATA, WEIGHT]) is None


def test_other_operators_and_operands() -> None:
    assert form_of(_spec("aten.relu.default", TENSORS[0]), [DATA]) is None
    turned = [TENSORS[1], TENSORS[0], None]
    assert form_of(_spec(FORWARD, *turned, *SAME), [DATA, WEIGHT]) is None
    assert form_of(_spec(FORWARD, *TENSORS, *SAME), [DATA, (24, 16, 5, 5), BIAS]) is None


FORM = SameConvolution(ConvolutionResult.RESULT, 2, 32, 32, 40, 40)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each time, without stored choices."""
    monkeypatch.setattr(convolution_loops, "choice", lambda question, among, measure: measure())


def _slow(form: SameConvolution) -> Callable[..., None]:
    def run(*tensors: torch.Tensor) -> None:
        time.sleep(0.05)
        tensors[-1].copy_(by_definition(form, tensors[:-1]))

    return run


def _imprecise(form: SameConvolution) -> Callable[..., None]:
    def run(*tensors: torch.Tensor) -> None:
        halves = [t.bfloat16().float() for t in tensors[:-1]]
        tensors[-1].copy_(by_definition(form, halves))

    return run


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("make", [_slow, _imprecise, lambda form: None])
def test_slow_or_imprecise_loops_are_not_chosen(
    make: Callable[[SameConvolution], Callable[..., None] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if make is _imprecise:
        monkeypatch.setattr(convolution_loops, "race", lambda candidates: [2.0, 1.0])
    assert not faster_in_loops(FORM, make)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("part", ConvolutionResult)
def test_right_loops_are_measured(part: ConvolutionResult, monkeypatch: pytest.MonkeyPatch) -> None:
    form = SameConvolution(part, 2, 32, 40, 24, 24, biased=part is ConvolutionResult.RESULT)
    for times, expected in (([1.0, 0.9], True), ([1.0, 0.99], False)):
        monkeypatch.setattr(convolution_loops, "race", lambda candidates, times=times: times)
        assert faster_in_loops(form, convolution) == expected


def test_small_convolutions_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_loops, "choice", None)
    assert not faster_in_loops(SameConvolution(ConvolutionResult.RESULT, *SIZE), convolution)

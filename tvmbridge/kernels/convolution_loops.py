"""Measure whether a float32 3x3 convolution, or a gradient of one, is faster in generated loops."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tvmbridge.kernels.choice import GAIN, as_precise, operands_to_measure, race
from tvmbridge.kernels.convolution import BACKWARD
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution, Shape
from tvmbridge.kernels.table import choice

FORWARD = "aten.convolution.default"
"""The overload that computes a convolution in eager PyTorch."""

_LIBRARY, _LOOPS = _WAYS = ("library", "loops")
# Smaller convolutions (in multiplications) take some ten microseconds either way.
_WORTH_MEASURING = 1 << 22
# Only this many channels are compared with the result in float64.
_MOST_FILTERS = 8
# Stride, padding, dilation, transposed, output padding, groups.
_SAME = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]

Maker = Callable[[SameConvolution], Callable[..., None] | None]
"""Compiles the loops of one form to a function of operands and result; None if it has no loops."""


def form_of(spec: str, shapes: Sequence[Shape]) -> tuple[SameConvolution, list[int]] | None:
    """Return the convolution that an ATen call computes, and which of its tensors are the operands.

    None unless the call computes a 3x3 convolution that keeps the size of images, or a gradient of
    one.
    """
    content = json.loads(spec)
    given = [{"tensor": i} for i in range(len(shapes))]
    if content["op"] == FORWARD:
        biased, operands, settings = len(shapes) == 3, content["args"][:3], content["args"][3:]
        if operands != [*given, *[None] * (3 - len(given))] or settings != _SAME:
            return None
        if not _is_square(shapes[1]):
            return None
        return SameConvolution.of(ConvolutionResult.RESULT, shapes[0], shapes[1], biased), [
            0,
            1,
            2,
        ][: 2 + biased]
    if content["op"] != BACKWARD or len(shapes) != 3:
        return None
    *operands, _, stride, padding, dilation, transposed, extra, groups, mask = content["args"]
    settings = [stride, padding, dilation, transposed, extra, groups]
    if operands != given or settings != _SAME or not _is_square(shapes[2]):
        return None
    for place, part, read in (
        (0, ConvolutionResult.DATA, [0, 2]),
        (1, ConvolutionResult.WEIGHT, [0, 1]),
    ):
        if content["results"] == [place] and mask == [place == i for i in range(3)]:
            return SameConvolution.of(part, shapes[1], shapes[2]), read
    return None


def _is_square(weight: Shape) -> bool:
    return len(weight) == 4 and weight[2:] == (3, 3)


def faster_in_loops(form: SameConvolution, make: Maker) -> bool:
    """Whether loops are as precise as PyTorch's kernel and were measured to be faster."""
    if form.work < _WORTH_MEASURING:
        return False
    measure = functools.partial(_faster, form, make)
    return choice(f"float32 {form}", _WAYS, measure) == _LOOPS


def _faster(form: SameConvolution, make: Maker) -> str:
    loops = make(form)
    if loops is None:
        return _LIBRARY
    operands = [t - 0.5 for t in operands_to_measure(form.shapes[:-1], torch.float32)]
    out = torch.empty(form.shapes[-1], device="cpu")
    with torch.no_grad():
        found = usual(form, operands)
        loops(*operands, out)
        exact = _exactly(form, operands)
        some = tuple(slice(n) for n in exact.shape)
        if not as_precise(out[some], found[some], exact, times=2):
            return _LIBRARY
        seconds = race([lambda: usual(form, operands), lambda: loops(*operands, out)])
    return _LOOPS if seconds[1] < GAIN * seconds[0] else _LIBRARY


def usual(form: SameConvolution, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the result of eager PyTorch's kernel for these operands."""
    if form.part is ConvolutionResult.RESULT:
        bias = operands[2] if form.biased else None
        result: torch.Tensor = torch.ops.aten.convolution(*operands[:2], bias, *_SAME)
        return result
    wanted = torch.empty(form.shapes[-1], dtype=operands[0].dtype, device="cpu")
    mask = [form.part is ConvolutionResult.DATA, form.part is ConvolutionResult.WEIGHT, False]
    data, weight = (wanted, operands[1]) if mask[0] else (operands[1], wanted)
    gradients = torch.ops.aten.convolution_backward(operands[0], data, weight, None, *_SAME, mask)
    gradient: torch.Tensor = gradients[mask.index(True)]
    return gradient


def _exactly(form: SameConvolution, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a part of the result in float64: some channels of one image, or some filters."""
    some = slice(_MOST_FILTERS)
    first, second, *bias = (t.double() for t in operands)
    if form.part is ConvolutionResult.WEIGHT:
        first = first[:, some]
        return usual(replace(form, filters=first.shape[1]), [first, second])
    if form.part is ConvolutionResult.DATA:
        second = second[:, some]
        return usual(replace(form, batch=1, channels=second.shape[1]), [first[:1], second])
    return usual(form, [first[:1], second[some], *(b[some] for b in bias)])

"""Measure whether a network's convolutions are faster on images with channels last, on the CPU.

The convolutions of a network decide together: a network in two layouts would convert images between
them. A convolution whose error would be many times eager PyTorch's keeps channels second
(:mod:`.packed_convolution` says why).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tvmbridge.kernels.choice import ENOUGH_SECONDS, race
from tvmbridge.kernels.convolution import reads_slice
from tvmbridge.kernels.convolution_loops import Maker
from tvmbridge.kernels.packed_convolution import (
    PackedForm,
    not_packed,
    operands_of_form,
    precision_of,
)
from tvmbridge.kernels.table import choice

# Only a clear gain pays for the other layout: what lies between convolutions is not measured.
_GAIN = 0.95
_LAST, _SECOND = _LAYOUTS = ("last", "second")
# Smaller networks (in multiplications) take microseconds either way.
_WORTH_MEASURING = 1 << 23
# Larger batches are measured with so many images.
_MOST_IMAGES = 4
# All races of a network take this many seconds, and none takes fewer than the second number: the
# sum over many convolutions decides, so that each needs fewer repetitions than one alone.
_SECONDS, _LEAST_SECONDS = 0.4, 0.004


def faster_with_channels_last(
    forms: Sequence[PackedForm], has_backward: bool, make: Maker
) -> frozenset[PackedForm]:
    """Return the forms whose convolutions are to have channels last; none if that is not faster.

    Args:
        forms: the float32 convolutions of a network, each as often as it has it.
        has_backward: whether their gradients are computed as well.
        make: compiles loops, which compete with PyTorch's kernels for channels second.
    """
    if not forms or not torch.backends.mkldnn.is_available():
        return frozenset()
    if sum(form.work for form in forms) < _WORTH_MEASURING:
        return frozenset()
    fewer = [form.of_images(_MOST_IMAGES) for form in forms]
    name = hashlib.sha256("".join(sorted(form.spec for form in fewer)).encode()).hexdigest()[:24]
    question = f"channels of {len(forms)} convolutions{' with gradients' * has_backward}, {name}"
    measure = partial(_faster_layout, tuple(fewer), has_backward, make)
    if choice(question, _LAYOUTS, measure) == _SECOND:
        return frozenset()
    return frozenset(f for f, some in zip(forms, fewer, strict=True) if _is_precise(some))


def _faster_layout(forms: Sequence[PackedForm], has_backward: bool, make: Maker) -> str:
    second = last = 0.0
    distinct = dict.fromkeys(forms)
    enough = max(_LEAST_SECONDS, _SECONDS / len(distinct) / (1 + has_backward))
    for form in distinct:
        if has_backward and reads_slice(form.weight, form.stride):
            continue  # PyTorch's kernel for its gradient with channels last is not called
        seconds = _seconds(form, has_backward, make, min(enough, ENOUGH_SECONDS))
        second += forms.count(form) * seconds[0]
        last += forms.count(form) * (seconds[1] if _is_precise(form) else seconds[0])
    return _LAST if last < _GAIN * second else _SECOND


def _is_precise(form: PackedForm) -> bool:
    question = f"precision of a convolution with channels last {form.spec}"
    return choice(question, ("precise", ""), partial(precision_of, form, form.plain)) == "precise"


def _seconds(form: PackedForm, has_backward: bool, make: Maker, enough: float) -> list[float]:
    """Return the seconds with channels second, and last, after ``enough`` seconds of each race."""
    x, last, weight = operands_of_form(form)
    with torch.no_grad():
        candidates = [not_packed(form, make, x, weight), lambda: form.plain(last, weight)]
        seconds = race(candidates, enough)
        if has_backward:
            more = race([_gradients(form, data, weight) for data in (x, last)], enough)
            seconds = [a + b for a, b in zip(seconds, more, strict=True)]
    return seconds


def _gradients(form: PackedForm, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    """Return a function that computes the gradients of data and weight."""
    cotangent = torch.zeros_like(form.plain(x, weight))
    settings = [form.stride, form.padding, form.dilation, False, (0, 0), form.groups]
    kernel = torch.ops.aten.convolution_backward.default
    return lambda: kernel(cotangent, x, weight, None, *settings, [True, True, False])

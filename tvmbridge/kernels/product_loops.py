"""Measure whether a float32 product is faster with generated loops than by a library alone.

The loops either multiply, or copy a transposed left operand into the layout that a library reads.
The gradient of a linear layer's weight has such an operand: the transposed cotangent times the
input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tvmbridge.kernels.choice import (
    GAIN,
    as_precise,
    exactly,
    library_product,
    operands_to_measure,
    race,
    written,
)
from tvmbridge.kernels.matmul import matmul_spec, onednn_program
from tvmbridge.kernels.product_form import Form
from tvmbridge.kernels.table import choice

LIBRARY, TRANSPOSED, MULTIPLIED = "library", "of a transposed copy", "multiplied by loops"

# A product with fewer multiplications is not worth a function of its own in compiled code, and a
# copy is not worth another kernel.
_WORTH_LOOPS, _WORTH_COPYING = 1 << 20, 1 << 25
# Products of at least so much work have a rate (multiplications a second) that others may reach;
# so many of them show the highest rate, and a library at this part of it competes with no loops.
_WORTH_A_RATE, _ENOUGH_RATES, _NEARLY = 1 << 24, 3, 0.9
# By the number of threads: the rates of the fastest candidates.
_rates: dict[int, list[float]] = {}

_Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Loops:
    """Functions that compile generated loops to stand-alone kernels.

    - ``transposition``: takes the rows and columns of a matrix; returns a kernel to transpose it.
    - ``multiplication``: takes a form, and returns a kernel that multiplies; None if the form has
      no loops.
    """

    transposition: Callable[[int, int], Callable[[torch.Tensor], torch.Tensor]]
    multiplication: Callable[[Form], Callable[..., None] | None]


def fastest(form: Form, loops: Loops, *, multiply: bool = True) -> str:
    """Return the fastest way to compute a product, by measurement.

    Args:
        multiply: whether loops may multiply. Such loops add no bias and need fixed sizes.

    Returns:
        ``LIBRARY``: the library alone; ``TRANSPOSED``: the library on a copy of the left operand
        that loops transpose; ``MULTIPLIED``: loops alone.
    """
    among, is_copied = [LIBRARY], form.left_transposed and form.batch is None
    if is_copied and form.work >= _WORTH_COPYING and torch.backends.mkldnn.is_available():
        among.append(TRANSPOSED)
    if form.work >= _WORTH_LOOPS and multiply:
        among.append(MULTIPLIED)
    if len(among) == 1:
        return LIBRARY
    question = f"float32 {form} by {', '.join(among)}"
    return choice(question, tuple(among), functools.partial(_fastest, form, loops, among))


def _fastest(form: Form, loops: Loops, among: list[str]) -> str:
    left, right, _ = form.shapes
    a, b = operands_to_measure([left, right], torch.float32)
    library = library_product(*form.operands, form.shapes[2], a, b)
    candidates = {LIBRARY: library}
    with torch.no_grad():
        if _is_nearly_fastest(form, library):
            return LIBRARY
        if TRANSPOSED in among:
            candidates[TRANSPOSED] = _of_copy(form, a, b, loops)
        if MULTIPLIED in among and (run := _multiplied(form, a, b, loops)) is not None:
            candidates[MULTIPLIED] = run
        if len(candidates) == 1:
            return LIBRARY
        usual, exact = library(), exactly(*form.operands, [a, b])
        precise = {n: r for n, r in candidates.items() if as_precise(r(), usual, exact)}
        seconds = dict(zip(precise, race(list(precise.values())), strict=True))
    name = min(seconds, key=lambda n: seconds[n])
    if form.work >= _WORTH_A_RATE:
        _rates.setdefault(torch.get_num_threads(), []).append(form.work / seconds[name])
    return name if seconds[name] < GAIN * seconds[LIBRARY] else LIBRARY


def _is_nearly_fastest(form: Form, library: _Run) -> bool:
    """Whether the library multiplies at nearly the highest rate that was measured here.

    Loops could gain little then. To compile them takes a tenth of a second.
    """
    rates = _rates.get(torch.get_num_threads(), [])
    if len(rates) < _ENOUGH_RATES:
        return False
    (seconds,) = race([library])
    return form.work / seconds >= _NEARLY * max(rates)


def _of_copy(form: Form, a: torch.Tensor, b: torch.Tensor, loops: Loops) -> _Run:
    spec = matmul_spec((None, form.operands[1][1]), form.shapes[2])
    onednn, transpose = onednn_program(spec), loops.transposition(form.depth, form.rows)
    return lambda: onednn(transpose(a), b)


def _multiplied(form: Form, a: torch.Tensor, b: torch.Tensor, loops: Loops) -> _Run | None:
    multiply = loops.multiplication(form)
    return None if multiply is None else written(multiply, a, b, form.shapes[2])

"""Whether a float32 product is faster with loops of ours than by a library alone.

Loops may multiply, or copy a transposed left operand into the order that a library reads: a linear
layer's weight has such a gradient, the cotangent, transposed, times the input.
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

# Products of fewer multiplications are not worth a function of their own in compiled code, and
# copies not worth one more kernel.
_WORTH_LOOPS, _WORTH_COPYING = 1 << 20, 1 << 25

_Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Loops:
    """What makes kernels of ours, alone: functions of tensors.

    ``transposition`` is of a matrix of so many rows and columns; ``multiplication`` is None for a
    form that there are no loops for.
    """

    transposition: Callable[[int, int], Callable[[torch.Tensor], torch.Tensor]]
    multiplication: Callable[[Form], Callable[..., None] | None]


def fastest(form: Form, loops: Loops, *, multiply: bool = True) -> str:
    """``LIBRARY``, ``TRANSPOSED`` or ``MULTIPLIED``, whichever is measured to be the fastest.

    ``multiply``: whether loops may multiply, which add no bias, and have one size.
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
    candidates = {LIBRARY: library_product(*form.operands, form.shapes[2], a, b)}
    if TRANSPOSED in among:
        candidates[TRANSPOSED] = _of_copy(form, a, b, loops)
    if MULTIPLIED in among and (run := _multiplied(form, a, b, loops)) is not None:
        candidates[MULTIPLIED] = run
    with torch.no_grad():
        usual, exact = candidates[LIBRARY](), exactly(*form.operands, [a, b])
        precise = {n: r for n, r in candidates.items() if as_precise(r(), usual, exact)}
        seconds = dict(zip(precise, race(list(precise.values())), strict=True))
    name = min(seconds, key=lambda n: seconds[n])
    return name if seconds[name] < GAIN * seconds[LIBRARY] else LIBRARY


def _of_copy(form: Form, a: torch.Tensor, b: torch.Tensor, loops: Loops) -> _Run:
    spec = matmul_spec((None, form.operands[1][1]), form.shapes[2])
    onednn, transpose = onednn_program(spec), loops.transposition(form.depth, form.rows)
    return lambda: onednn(transpose(a), b)


def _multiplied(form: Form, a: torch.Tensor, b: torch.Tensor, loops: Loops) -> _Run | None:
    multiply = loops.multiplication(form)
    return None if multiply is None else written(multiply, a, b, form.shapes[2])

"""Whether a product of a transposed matrix is faster when that is transposed in memory before.

It is the gradient of a linear layer's weight: the cotangent, transposed, times the input. oneDNN
copies such an operand into the order that it reads, slower than a loop of ours does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tvmbridge.kernels.choice import (
    GAIN,
    Operand,
    as_precise,
    exactly,
    faster_with_onednn,
    operands_to_measure,
    race,
)
from tvmbridge.kernels.matmul import matmul_spec, onednn_program, program
from tvmbridge.kernels.table import choice

Transposition = Callable[[int, int], Callable[[torch.Tensor], torch.Tensor]]

# Fewer multiplications take less time than one more kernel can win.
_WORTH_COPYING = 1 << 25
_NO, _YES = _ANSWERS = ("as it lies", "transposed before")


def faster_transposed(
    rows: int, columns: int, right: Operand, transposition: Transposition
) -> bool:
    """Whether ``left.T @ right`` is faster of a transposed copy of a float32 ``left``.

    Args:
        rows, columns: of ``left``, which is contiguous.
        right: shape of the other operand in memory, and its view as a matrix of ``rows`` rows.
        transposition: makes the function that transposes a matrix of so many rows and columns.
    """
    width = (right[1][0] if right[1] else right[0])[1]
    if rows * columns * width < _WORTH_COPYING or not torch.backends.mkldnn.is_available():
        return False
    question = f"float32 product of a transposed {rows}x{columns} and {right}"
    measure = functools.partial(_faster, rows, columns, right, width, transposition)
    return choice(question, _ANSWERS, measure) == _YES


def _faster(
    rows: int, columns: int, right: Operand, width: int, transposition: Transposition
) -> str:
    left: Operand = ((rows, columns), ((columns, rows), (1, columns)))
    result = (columns, width)
    a, b = operands_to_measure([left[0], right[0]], torch.float32)
    spec, out = matmul_spec((left[1], right[1]), result), torch.empty(result, device="cpu")
    library, onednn = program(spec), onednn_program(spec)
    copied = onednn_program(matmul_spec((None, right[1]), result))
    transpose = transposition(rows, columns)
    usual: Callable[[], object] = lambda: library(a, b, out)  # noqa: E731
    if faster_with_onednn(left, right, result, False):
        usual = lambda: onednn(a, b)  # noqa: E731
    with torch.no_grad():
        library(a, b, out)
        if not as_precise(copied(transpose(a), b), out, exactly(left, right, [a, b])):
            return _NO
        first, second = race([usual, lambda: copied(transpose(a), b)])
    return _YES if second < GAIN * first else _NO

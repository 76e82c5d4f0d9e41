"""Whether a float32 product is faster with loops of ours than by a library alone.

Loops may multiply, or copy a transposed left operand into the order that a library reads: a linear
layer's weight has such a gradient, the cotangent, transposed, times the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

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

LIBRARY, TRANSPOSED, MULTIPLIED = "library", "of a transposed copy", "multiplied by loops"

# Products of fewer multiplications are not worth a function of their own in compiled code, and
# copies not worth one more kernel.
_WORTH_LOOPS, _WORTH_COPYING = 1 << 20, 1 << 25

_Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Loops:
    """What makes kernels of ours, alone: functions of tensors.

    ``transposition`` is of a matrix of so many rows and columns, ``multiplication`` of the rows
    and columns of the product, its depth, and whether the left operand lies transposed; it is None
    where there is none.
    """

    transposition: Callable[[int, int], Callable[[torch.Tensor], torch.Tensor]]
    multiplication: Callable[[int, int, int, bool], Callable[..., None] | None]


@dataclass(frozen=True)
class Matrices:
    """Operands of a product: a left one without gaps, and any right one.

    ``transposed``: the left one lies as (depth, rows).
    """

    rows: int
    columns: int
    depth: int
    transposed: bool
    right: Operand

    @property
    def plain(self) -> bool:
        """Whether the right operand lies as (depth, columns), without gaps."""
        shape, view = self.right
        size = (self.depth, self.columns)
        if prod(shape) != self.depth * self.columns:
            return False
        return shape == size if view is None else view == (size, (self.columns, 1))

    @property
    def left(self) -> Operand:
        """The left operand in memory, and its view."""
        if not self.transposed:
            return (self.rows, self.depth), None
        return (self.depth, self.rows), ((self.rows, self.depth), (1, self.rows))


def as_matrices(result: tuple[int, ...], left: Operand, right: Operand) -> Matrices | None:
    """The operands of a product of this shape; None where the left one has gaps."""
    rows, columns = result
    depth = (right[1][0] if right[1] else right[0])[0]
    size = (rows, depth)
    if prod(left[0]) != rows * depth:
        return None
    plain = left[0] == size if left[1] is None else left[1] == (size, (depth, 1))
    if not plain and left[1] != (size, (1, rows)):
        return None
    return Matrices(rows, columns, depth, not plain, right)


def fastest(product: Matrices, loops: Loops, *, biased: bool = False) -> str:
    """``LIBRARY``, ``TRANSPOSED`` or ``MULTIPLIED``, whichever is measured to be clearly faster."""
    work = product.rows * product.columns * product.depth
    among = [LIBRARY]
    if product.transposed and work >= _WORTH_COPYING and torch.backends.mkldnn.is_available():
        among.append(TRANSPOSED)
    if product.plain and work >= _WORTH_LOOPS and not biased:
        among.append(MULTIPLIED)
    if len(among) == 1:
        return LIBRARY
    question = f"float32 product {product.left} {product.right} by {', '.join(among)}"
    return choice(question, tuple(among), functools.partial(_fastest, product, loops, among))


def _fastest(product: Matrices, loops: Loops, among: list[str]) -> str:
    left, right = product.left, product.right
    a, b = operands_to_measure([left[0], right[0]], torch.float32)
    candidates = {LIBRARY: _library(product, a, b)}
    if TRANSPOSED in among:
        candidates[TRANSPOSED] = _of_copy(product, a, b, loops)
    if MULTIPLIED in among and (run := _in_loops(product, a, b, loops)) is not None:
        candidates[MULTIPLIED] = run
    with torch.no_grad():
        usual, exact = candidates[LIBRARY](), exactly(left, right, [a, b])
        precise = {n: r for n, r in candidates.items() if as_precise(r(), usual, exact)}
        seconds = dict(zip(precise, race(list(precise.values())), strict=True))
    name = min(seconds, key=lambda n: seconds[n])
    return name if seconds[name] < GAIN * seconds[LIBRARY] else LIBRARY


def _library(product: Matrices, a: torch.Tensor, b: torch.Tensor) -> _Run:
    result = (product.rows, product.columns)
    spec = matmul_spec((product.left[1], product.right[1]), result)
    if faster_with_onednn(product.left, product.right, result, False):
        onednn = onednn_program(spec)
        return lambda: onednn(a, b)
    library, out = program(spec), torch.empty(result, device="cpu")

    def run() -> torch.Tensor:
        library(a, b, out)
        return out

    return run


def _of_copy(product: Matrices, a: torch.Tensor, b: torch.Tensor, loops: Loops) -> _Run:
    spec = matmul_spec((None, product.right[1]), (product.rows, product.columns))
    onednn, transpose = onednn_program(spec), loops.transposition(product.depth, product.rows)
    return lambda: onednn(transpose(a), b)


def _in_loops(product: Matrices, a: torch.Tensor, b: torch.Tensor, loops: Loops) -> _Run | None:
    rows, columns, depth = product.rows, product.columns, product.depth
    multiply = loops.multiplication(rows, columns, depth, product.transposed)
    if multiply is None:
        return None
    out, right = torch.empty(rows, columns, device="cpu"), b.view(depth, columns)

    def run() -> torch.Tensor:
        multiply(a, right, out)
        return out

    return run

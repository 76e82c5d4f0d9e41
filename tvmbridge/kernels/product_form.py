"""Products of two matrices without gaps: sizes, and how the operands lie in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvmbridge.kernels.choice import Operand
from tvmbridge.kernels.matmul import View


@dataclass(frozen=True)
class Form:
    """Sizes of a product (rows, columns) over ``depth``, and which operand lies transposed.

    A left one as (depth, rows), a right one as (columns, depth).
    """

    rows: int
    columns: int
    depth: int
    left_transposed: bool = False
    right_transposed: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Of both operands in memory, and of the result."""
        left, right = (self.rows, self.depth), (self.depth, self.columns)
        return (
            left[::-1] if self.left_transposed else left,
            right[::-1] if self.right_transposed else right,
            (self.rows, self.columns),
        )

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Shapes in memory, and the views of those that lie transposed."""
        left, right, _ = self.shapes
        return (
            (left, _transposed(left) if self.left_transposed else None),
            (right, _transposed(right) if self.right_transposed else None),
        )


def form_of(left: Operand, right: Operand, result: tuple[int, ...]) -> Form | None:
    """The form of a product; None where it is no matrix, or an operand has gaps."""
    if len(result) != 2:
        return None
    rows, columns = result
    depth = (right[1][0] if right[1] else right[0])[0]
    transposed = _lies_transposed(left, (rows, depth)), _lies_transposed(right, (depth, columns))
    if transposed[0] is None or transposed[1] is None:
        return None
    return Form(rows, columns, depth, transposed[0], transposed[1])


def _lies_transposed(operand: Operand, size: tuple[int, int]) -> bool | None:
    """Whether it does; None where it is not of this size without gaps."""
    shape, view = operand
    if prod(shape) != prod(size):
        return None
    if shape == size if view is None else view == (size, (size[1], 1)):
        return False
    return True if view == (size, (1, size[0])) else None


def _transposed(shape: tuple[int, int]) -> View:
    rows, columns = shape
    return (columns, rows), (1, columns)

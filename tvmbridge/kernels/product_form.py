"""The form of a matrix product: its sizes, and which of its dense operands is transposed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvmbridge.kernels.matmul import Operand, View

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Sizes and memory layout of a product ``(rows, depth) @ (depth, columns)``.

    - ``left_transposed``: whether the left operand is in memory as (depth, rows).
    - ``right_transposed``: whether the right operand is in memory as (columns, depth).
    - ``batch``: the number of products in a batch; None for one product of two-dimensional tensors.
    - ``left_shared``: whether all products of a batch have the same left operand, one matrix.
    """

    rows: int
    columns: int
    depth: int
    left_transposed: bool = False
    right_transposed: bool = False
    batch: int | None = None
    left_shared: bool = False

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """The shapes of both operands in memory, and of the result."""
        left, right = (self.rows, self.depth), (self.depth, self.columns)
        batch = () if self.batch is None else (self.batch,)
        return (
            (*(() if self.left_shared else batch), *(left[::-1] if self.left_transposed else left)),
            (*batch, *(right[::-1] if self.right_transposed else right)),
            (*batch, self.rows, self.columns),
        )

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Both operands: the shape in memory, and the view of a transposed operand."""
        left, right, _ = self.shapes
        return (
            (left, _transposed(left) if self.left_transposed else None),
            (right, _transposed(right) if self.right_transposed else None),
        )

    @property
    def work(self) -> int:
        """The number of multiplications."""
        return (self.batch or 1) * self.rows * self.columns * self.depth


def form_of(left: Operand, right: Operand, result: Shape) -> Form | None:
    """Return the form of a product; None if an operand is neither dense nor a dense transpose."""
    *batch, rows, columns = result
    depth = (right[1][0] if right[1] else right[0])[-2]
    lies = (
        _lies_transposed(left, (*batch, rows, depth)),
        _lies_transposed(right, (*batch, depth, columns)),
    )
    if lies[0] is None or lies[1] is None:
        return None
    assert len(batch) < 2
    return Form(rows, columns, depth, lies[0], lies[1], batch[0] if batch else None)


def _lies_transposed(operand: Operand, size: Shape) -> bool | None:
    """Whether a dense operand of ``size`` is transposed in memory; None if it is not dense."""
    shape, view = operand
    if prod(shape) != prod(size):
        return None
    if view is None:
        return False if shape == size else None
    if view == _contiguous(size):
        return False
    return True if view == _transposed((*size[:-2], size[-1], size[-2])) else None


def _contiguous(shape: Shape) -> View:
    return shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _transposed(shape: Shape) -> View:
    """Return the view of a dense tensor of ``shape`` with the last two dimensions exchanged."""
    *batch, rows, columns = shape
    outer = [rows * columns] * len(batch)
    return (*batch, columns, rows), (*outer, 1, columns)

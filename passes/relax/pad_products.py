"""Products in half precision whose rows are not aligned to 16 bytes are padded to rows that are.

Before::

    lv = R.permute_dims(w, axes=[1, 0])  # w: (50257, 768)
    lv1 = R.matmul(x, lv)

After::

    lv = R.nn.pad(w, [0, 7, 0, 0])
    lv1 = R.permute_dims(lv, axes=[1, 0])
    lv2 = R.matmul(x, lv1)
    lv3 = R.strided_slice(lv2, axes=[1], begin=[0], end=[50257])

cuBLAS has fast kernels for aligned rows alone. Rows of 50,257 numbers, the logits of a language
model, take them three to seven times as long. The zeros of a padded inner dimension add nothing.

Requires: products of matrices have been reshaped to two dimensions, if possible. Guarantees:
products of aligned rows, and those that copying would cost more, are untouched.
Runs after: the split into forward and backward. Runs before: DispatchKernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import op

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    dtype_of,
    is_call,
    map_calls,
    shape_of,
    transposed_of,
)

_HALVES = ("float16", "bfloat16")
_ITEMSIZE = 2
_ALIGNED = 8
# Measured on one H100 (8,192 rows, bfloat16): a multiplication and addition of a product
# whose rows have an odd length takes 12 to 18 femtoseconds longer than one of aligned rows, or 5 if
# the length is even; a copy moves 1.6 bytes a picosecond. What is won must exceed the copies.
_LOST_ODD, _LOST_EVEN = 12.0, 5.0
_COPY = 0.6e3
_MARGIN = 1.2


@dataclass(frozen=True)
class PadProducts(RelaxPass):
    """Pad the unaligned rows of large products in half precision."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            call = builder.normalize(call)
            sizes = sizes_of(call)
            if sizes is None:
                return call
            rows, depth, columns = sizes
            stored = tuple(transposed_of(operand, builder.lookup_binding) for operand in call.args)
            more = padding_of(rows, depth, columns, stored)
            if more is None:
                return call
            report.rewrote()
            product = builder.emit(padded_product(builder, call, stored, more))
            more_rows, _, more_columns = more
            if not more_rows and not more_columns:
                return product
            return op.strided_slice(product, [0, 1], [0, 0], [rows, columns])

        return map_calls(mod, rewrite, report)


def sizes_of(call: relax.Expr | None) -> tuple[int, int, int] | None:
    """Return the rows, depth and columns of a product of two matrices in one half precision."""
    if not is_call(call, "relax.matmul"):
        return None
    left, right = call.args
    shape, other = shape_of(left), shape_of(right)
    if shape is None or other is None or not len(shape) == len(other) == 2:
        return None
    if dtype_of(call) not in _HALVES or not dtype_of(left) == dtype_of(right) == dtype_of(call):
        return None
    return (*shape, other[1])


def padded_product(
    builder: relax.BlockBuilder,
    call: relax.Call,
    stored: tuple[relax.Expr | None, ...],
    more: tuple[int, int, int],
) -> relax.Call:
    """Return a product with padded operands, which ``builder`` emits.

    ``stored`` and ``more`` are as for, and as returned by, :func:`padding_of`.
    """
    more_rows, more_depth, more_columns = more
    left, right = call.args
    return op.matmul(
        _padded(builder, left, stored[0], more_rows, more_depth),
        _padded(builder, right, stored[1], more_depth, more_columns),
    )


def _padded(
    builder: relax.BlockBuilder,
    operand: relax.Expr,
    stored: relax.Expr | None,
    more_rows: int,
    more_columns: int,
) -> relax.Expr:
    """Return an operand, or the transpose of ``stored``, with more rows and columns of 0."""
    if not more_rows and not more_columns:
        return operand
    if stored is None:
        return builder.emit(op.nn.pad(operand, [0, more_rows, 0, more_columns]))
    wide = builder.emit(op.nn.pad(stored, [0, more_columns, 0, more_rows]))
    return builder.emit(op.permute_dims(wide, [1, 0]))


def padding_of(
    rows: int,
    depth: int,
    columns: int,
    stored: tuple[relax.Expr | None, ...],
) -> tuple[int, int, int] | None:
    """Return by how much to pad rows, depth and columns; None if padding does not pay.

    Args:
        stored: the matrices that the operands are the transposes of, or None.
    """
    left, right = stored
    more_rows = -rows % _ALIGNED if left is not None else 0
    more_depth = -depth % _ALIGNED if left is None or right is not None else 0
    more_columns = -columns % _ALIGNED
    if not (more_rows or more_depth or more_columns):
        return None
    copied = 0
    if more_rows or more_depth:
        copied += rows * depth
    if more_depth or more_columns:
        copied += depth * columns
    if more_rows or more_columns:
        copied += rows * columns
    is_odd = any(more % 2 for more in (more_rows, more_depth, more_columns))
    won = rows * depth * columns * (_LOST_ODD if is_odd else _LOST_EVEN)
    lost = 2 * _ITEMSIZE * copied * _COPY
    return (more_rows, more_depth, more_columns) if won > _MARGIN * lost else None

"""Compute operators that return no elements, or that reduce over no elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.broadcast import INJECTIVE
from tvmbridge.legalize.lets import constant
from tvmbridge.passes.base import dtype_of, shape_of

# By the beginning of an operator's name: its result for operands without elements.
_RESULTS = {
    "aten.sum.": 0.0,
    "aten.mean.": math.nan,
    "aten.prod.": 1.0,
    "aten.any.": 0.0,
    "aten.all.": 1.0,
    "aten.mm.": 0.0,
    "aten.bmm.": 0.0,
    "aten.matmul.": 0.0,
}


def without_elements(
    bb: relax.BlockBuilder, call: Call, operator: str, tensors: Sequence[Expr]
) -> Expr | None:
    """Return the result of an ATen call that reads or returns no element; None for other calls."""
    shape = shape_of(call)
    if shape is None:
        return None
    dtype = dtype_of(call)
    if not prod(shape):
        return relax.op.zeros(list(shape), dtype)
    shapes = [shape_of(tensor) for tensor in tensors]
    if not shapes or any(each is None or prod(each) for each in shapes):
        return None
    value = next((v for name, v in _RESULTS.items() if operator.startswith(name)), None)
    if value is None or (math.isnan(value) and "float" not in dtype):
        return None

    def filled() -> te.Tensor:
        number = tirx.Cast(dtype, constant(value, "float32"))
        return te.compute(list(shape), lambda *_: number, name="T_filled")

    attrs = {"op_pattern": INJECTIVE}
    return bb.call_te(filled, primfunc_name_hint="filled", primfunc_attrs=attrs)

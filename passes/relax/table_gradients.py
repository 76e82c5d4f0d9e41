"""The gradient of a look-up in a small table becomes a kernel of our own.

Before::

    lv = R.grad.take_backward(gradient, table, index, axis=0)

After::

    lv = R.call_tir(table_gradient, (gradient, index), out_ty=R.Tensor((732, 12), "float32"))

So does ``aten.index_put`` that adds rows to zeros, the gradient of ``table[index]``. Halves are
added up in float32 and rounded once, as by PyTorch.

Requires: static shapes. Guarantees: gradients of tables for which PyTorch's sort costs less
(``schedules/gpu/table_gradients.py``) are untouched.
Runs after: the split. Runs before: DispatchKernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import op

from tvmbridge.kernels.aten_call import aten_call_operator, spec_of, tensors_of
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, is_call, map_calls, shape_of
from tvmbridge.passes.relax.constants import uniform_value
from tvmbridge.schedules.gpu.table_gradients import fits, table_gradient

_HALVES = ("float16", "bfloat16")
_INDICES = ("int32", "int64")


@dataclass(frozen=True)
class TableGradients(RelaxPass):
    """Replace gradients of look-ups in small tables."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            call = builder.normalize(call)
            found = _values_and_index(call, builder)
            replaced = None if found is None else _replaced(call, *found, builder)
            if replaced is None:
                return call
            report.rewrote()
            return replaced

        return map_calls(mod, rewrite, report)


def _values_and_index(
    call: relax.Call, builder: relax.BlockBuilder
) -> tuple[relax.Expr, relax.Expr] | None:
    """Return what ``call`` adds to the rows of a table of zeros, and the rows; None if neither."""
    if is_call(call, "relax.grad.take_backward"):
        values, _, index = call.args
        first = call.attrs.axis is not None and int(call.attrs.axis) == 0
        return (values, index) if first else None
    if aten_call_operator(call) != "aten.index_put.default":
        return None
    x, indices, values, *accumulate = spec_of(call)["args"]
    tensors = tensors_of(call)
    if accumulate != [True]:
        return None
    if uniform_value(tensors[x["tensor"]], builder.lookup_binding) != 0.0:
        return None
    first, *others = indices
    if first is None or any(other is not None for other in others):
        return None
    return tensors[values["tensor"]], tensors[first["tensor"]]


def _replaced(
    call: relax.Call, values: relax.Expr, index: relax.Expr, builder: relax.BlockBuilder
) -> relax.Expr | None:
    shape, places, taken = shape_of(call), shape_of(index), shape_of(values)
    dtype, index_dtype = dtype_of(call), dtype_of(index)
    if shape is None or places is None or taken is None or not shape:
        return None
    if index_dtype not in _INDICES or dtype not in (*_HALVES, "float32", "float64"):
        return None
    rows, columns, count = shape[0], math.prod(shape[1:]), math.prod(places)
    if math.prod(taken) != columns * count or not fits(rows, columns, count):
        return None
    emit, added = builder.emit, "float32" if dtype in _HALVES else dtype
    if dtype_of(values) != added:
        values = emit(op.astype(values, added))
    values = emit(op.reshape(values, (count, columns)))
    index = emit(op.reshape(index, (count,)))
    kernel = table_gradient(rows, columns, count, added, index_dtype)
    function = builder.add_func(kernel, "table_gradient")
    type_ = relax.TensorType([rows, columns], added)
    result = emit(relax.call_tir(function, [values, index], type_))
    result = emit(op.reshape(result, shape))
    return result if added == dtype else op.astype(result, dtype)

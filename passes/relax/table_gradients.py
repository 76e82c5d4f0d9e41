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
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.aten_call import aten_call_operator, spec_of, tensors_of
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, shape_of, with_functions
from tvmbridge.passes.relax.constants import uniform_value
from tvmbridge.schedules.gpu.table_gradients import fits, table_gradient

_HALVES = ("float16", "bfloat16")
_INDICES = ("int32", "int64")


@dataclass(frozen=True)
class TableGradients(RelaxPass):
    """Replace gradients of look-ups in small tables."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        rewriter = _TableGradientMutator(mod, report)
        rewritten = with_functions(mod, rewriter)
        return rewritten if report.rewrites else mod


@mutator
class _TableGradientMutator(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, report: PassReport) -> None:
        super().__init__(mod)
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.builder_.normalize(super().visit_call_(call))
        if getattr(call.op, "name", "") == "relax.grad.take_backward":
            values, _, index = call.args
            if call.attrs.axis is not None and int(call.attrs.axis) == 0:
                return self._replaced(call, values, index)
        elif aten_call_operator(call) == "aten.index_put.default":
            return self._index_put(call)
        return call

    def _index_put(self, call: relax.Call) -> relax.Expr:
        x, indices, values, *accumulate = spec_of(call)["args"]
        tensors = tensors_of(call)
        if accumulate != [True]:
            return call
        if uniform_value(tensors[x["tensor"]], self.lookup_binding) != 0.0:
            return call
        first, *others = indices
        if first is None or any(other is not None for other in others):
            return call
        return self._replaced(call, tensors[values["tensor"]], tensors[first["tensor"]])

    def _replaced(self, call: relax.Call, values: relax.Expr, index: relax.Expr) -> relax.Expr:
        shape, places, taken = shape_of(call), shape_of(index), shape_of(values)
        dtype, index_dtype = dtype_of(call), dtype_of(index)
        if shape is None or places is None or taken is None or not shape:
            return call
        if index_dtype not in _INDICES or dtype not in (*_HALVES, "float32", "float64"):
            return call
        rows, columns, count = shape[0], math.prod(shape[1:]), math.prod(places)
        if math.prod(taken) != columns * count or not fits(rows, columns, count):
            return call
        self.report.rewrote()
        emit, added = self.builder_.emit, "float32" if dtype in _HALVES else dtype
        if dtype_of(values) != added:
            values = emit(op.astype(values, added))
        values = emit(op.reshape(values, (count, columns)))
        index = emit(op.reshape(index, (count,)))
        kernel = table_gradient(rows, columns, count, added, index_dtype)
        function = self.builder_.add_func(kernel, "table_gradient")
        type_ = relax.TensorType([rows, columns], added)
        result = emit(relax.call_tir(function, [values, index], type_))
        result = emit(op.reshape(result, shape))
        return result if added == dtype else op.astype(result, dtype)

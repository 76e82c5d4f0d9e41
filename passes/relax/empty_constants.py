"""A constant without elements becomes a reshape of a constant whose first extent is 0.

Before::

    y = R.call_tir(cls.concatenate, (x, metadata["relax.expr.Constant"][0]), ...)    # (4, 0)

After::

    lv = R.reshape(metadata["relax.expr.Constant"][0], R.shape([4, 0]))              # (0, 0)
    y = R.call_tir(cls.concatenate, (x, lv), ...)

TVM cannot load a constant without elements from a file unless its first extent is 0.

Requires: nothing. Guarantees: other constants stay as they are.
Runs after: FoldConstant, which makes constants. Runs before: schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_functions, shape_of


@dataclass(frozen=True)
class EmptyConstants(RelaxPass):
    """Replace constants without elements that TVM could not load from a file."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda function: _Reshaped(report).visit_expr(function))


@mutator
class _Reshaped(PyExprMutator):
    def __init__(self, report: PassReport) -> None:
        super().__init__()
        self.report = report

    def visit_generic_const_(self, constant: tvm.ir.GenericConst) -> relax.Expr:
        shape = shape_of(constant)
        if not shape or 0 not in shape or shape[0] == 0:
            return constant
        self.report.rewrote()
        dtype = dtype_of(constant)
        # In a reshape, an extent of 0 is the extent that the operand has there.
        loadable = relax.const(tvm.runtime.empty((0, *shape[1:]), dtype), dtype)
        return self.builder_.emit(relax.op.reshape(loadable, shape))

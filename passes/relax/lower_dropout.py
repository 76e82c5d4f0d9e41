"""Dropout becomes a multiplication with a mask that PyTorch draws.

Before::

    lv = R.nn.dropout(x, rate=0.1)
    y = lv[0]

After, with the new parameter ``dropout_mask_0: bool`` after the others::

    keep = R.astype(dropout_mask_0, "float32")
    y = R.multiply(x, R.multiply(keep, 1 / 0.9))

Requires: static shapes and rates between 0 and 1 (others are declined). Guarantees: no other
``relax.nn.dropout`` is left; the mask parameters are in program order.
Runs before: AppendCotangents. Runs after: the frontend.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    SpanBuilder,
    dtype_of,
    map_functions,
    shape_of,
    with_body,
)


@dataclass(frozen=True)
class LowerDropout(RelaxPass):
    """Replace every ``relax.nn.dropout`` by a product with a mask, a new parameter of dtype bool.

    Args:
        mask_prefix: the mask parameters are named ``mask_prefix0``, ``mask_prefix1`` ... in
            program order.
    """

    mask_prefix: str = "dropout_mask_"

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            lowering = _DropoutMutator(self.mask_prefix, report)
            body = lowering.visit_expr(function.body)
            if not lowering.masks:
                return function
            return with_body(function, body, [*function.params, *lowering.masks])

        return map_functions(mod, rewrite)


@mutator
class _DropoutMutator(PyExprMutator):
    def __init__(self, prefix: str, report: PassReport) -> None:
        super().__init__()
        self.prefix = prefix
        self.report = report
        self.masks: list[relax.Var] = []

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.nn.dropout"):
            return call
        x, rate = call.args[0], float(call.attrs.rate)
        shape = shape_of(x)
        if shape is None:
            self.report.decline("nn.dropout", "the shape is not static")
            return call
        if not 0.0 < rate < 1.0:
            self.report.decline("nn.dropout", f"the rate is {rate:g}")
            return call
        mask = relax.Var(f"{self.prefix}{len(self.masks)}", relax.TensorType(shape, "bool"))
        self.masks.append(mask)
        self.report.rewrote()
        dtype = dtype_of(x)
        builder = SpanBuilder(self.builder_, call.span)
        keep = builder.emit(relax.op.astype(mask, dtype))
        scale = relax.const(1.0 / (1.0 - rate), dtype)
        scaled = builder.emit(relax.op.multiply(keep, scale))
        return relax.Tuple([builder.emit(relax.op.multiply(x, scaled)), keep])

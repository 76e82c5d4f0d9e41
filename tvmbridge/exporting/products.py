"""Compute matrix products in tvmbridge's own loops, for code without PyTorch's libraries.

Before::

    lv = R.permute_dims(k, axes=[0, 2, 1])
    lv1 = R.matmul(q, lv)

After::

    lv1 = R.call_tir(product, (q, k), out_ty=R.Tensor((12, 128, 128), "float32"))

Requires: nothing. Products for which there are no loops stay, and LegalizeOps lowers them.
Guarantees: the same operands and results. Runs after: ConvolutionsAsProducts. Runs before:
LegalizeOps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import tvm
from tvm import relax, te
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.kernels.product_form import Form
from tvmbridge.legalize.broadcast import OPAQUE
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, shape_of, with_functions
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.products import fits, product
from tvmbridge.schedules.varying_products import PRODUCT, STRAIGHT, TRANSPOSED

# Products of fewer multiplications stay, so that they are fused with their neighbours.
_WORTH_LOOPS = 1 << 12


@dataclass(frozen=True)
class ProductsInLoops(RelaxPass):
    """Replace float32 products by tvmbridge's own loops, if there are loops for their form.

    Args:
        machine: the processor that the loops are for.
    """

    machine: Machine

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        rewriter = _ProductRewriter(mod, self.machine, report)
        rewritten = with_functions(mod, rewriter)
        return rewritten if report.rewrites else mod


@mutator
class _ProductRewriter(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, machine: Machine, report: PassReport) -> None:
        super().__init__(mod)
        self.machine = machine
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.builder_.normalize(super().visit_call_(call))
        if getattr(call.op, "name", "") != "relax.matmul" or dtype_of(call) != "float32":
            return call
        shapes = [shape_of(operand) for operand in call.args]
        if any(s is None or len(s) < 2 for s in shapes) or {*map(dtype_of, call.args)} != {
            "float32"
        }:
            return call
        found = self._in_loops(call)
        return call if found is None else found

    def _in_loops(self, call: relax.Call) -> relax.Expr | None:
        found = self._form(*call.args)
        if found is None:
            self.report.decline("matmul", "the batches of its operands differ")
            return None
        form, left, right = found
        if sizes_vary():
            return self._varying(form, left, right, call)
        if form.work < _WORTH_LOOPS or not fits(form, self.machine):
            self.report.decline("matmul", f"there are no loops for {form}")
            return None
        self.report.rewrote()
        callee = self.builder_.add_func(product(form, self.machine), "product")
        operands = [
            self._shaped(operand, shape)
            for operand, shape in zip((left, right), form.shapes, strict=False)
        ]
        result = relax.call_tir(callee, operands, relax.TensorType(form.shapes[2], "float32"))
        return self._shaped(self.builder_.emit(result), shape_of(call) or ())

    def _varying(
        self, form: Form, left: relax.Expr, right: relax.Expr, call: relax.Call
    ) -> relax.Expr | None:
        """Return a function to be scheduled as a product once code for all sample shapes exists."""
        if form.left_transposed or form.left_shared:
            return None
        self.report.rewrote()
        batch = 1 if form.batch is None else form.batch
        shapes = [(batch, *shape[-2:]) for shape in form.shapes]
        operands = [self._shaped(o, s) for o, s in zip((left, right), shapes, strict=False)]

        def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            k = te.reduce_axis((0, form.depth), name="k")

            def element(n: Expr, i: Expr, j: Expr) -> Expr:
                other = b(n, j, k) if form.right_transposed else b(n, k, j)
                return te.sum(a(n, i, k) * other, axis=k)

            return te.compute(shapes[2], element, name="product")

        lies = TRANSPOSED if form.right_transposed else STRAIGHT
        attrs = {"op_pattern": OPAQUE, PRODUCT: lies}
        result = self.builder_.call_te(
            compute, *operands, primfunc_name_hint="product", primfunc_attrs=attrs
        )
        return self._shaped(self.builder_.emit(result), shape_of(call) or ())

    def _form(
        self, left: relax.Expr, right: relax.Expr
    ) -> tuple[Form, relax.Expr, relax.Expr] | None:
        """Return the form of a product and its operands without their transpositions.

        Return None if the batch dimensions of the operands differ.
        """
        a, b = shape_of(left) or (), shape_of(right) or ()
        batch, (rows, depth), columns = a[:-2], a[-2:], b[-1]
        left, left_transposed = self._untransposed(left)
        right, right_transposed = self._untransposed(right)
        if prod(b[:-2]) == 1 and not (left_transposed and prod(batch) > 1):
            # The right operand is one matrix, so all left matrices are stacked into one.
            return (
                Form(prod(batch) * rows, columns, depth, left_transposed, right_transposed),
                left,
                right,
            )
        # The loops read one left matrix for all products, such as the weight of a convolution.
        shared = prod(batch) == 1
        if batch != b[:-2] and not shared:
            return None
        form = Form(rows, columns, depth, left_transposed, right_transposed, prod(b[:-2]), shared)
        return form, left, right

    def _untransposed(self, operand: relax.Expr) -> tuple[relax.Expr, bool]:
        """Return the tensor that ``operand`` is a transposed view of, and True.

        If the last two dimensions of ``operand`` are not exchanged, return ``operand`` and False.
        """
        value = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        shape = shape_of(operand) or ()
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != (
            "relax.permute_dims"
        ):
            return operand, False
        rank = len(shape)
        axes = value.attrs.axes
        order = list(range(rank))[::-1] if axes is None else [int(a) % rank for a in axes]
        if order != [*range(rank - 2), rank - 1, rank - 2]:
            return operand, False
        return value.args[0], True

    def _shaped(self, tensor: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        if shape_of(tensor) == shape:
            return tensor
        return self.builder_.emit(relax.op.reshape(tensor, shape))

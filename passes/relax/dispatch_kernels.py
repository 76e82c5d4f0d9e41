"""Matrix products and embedding lookups become calls of PyTorch's kernels, which also read views.

Before::

    lv = R.permute_dims(w, axes=[1, 0])
    lv1 = R.matmul(x, lv)
    lv2 = R.add(lv1, bias)

After::

    lv2 = R.call_dps_packed("tvmbridge.matmul", (spec, x, w, bias), out_ty=...)

where ``spec`` says that ``w`` is read with its strides exchanged. If loops of tvmbridge are
measured to be faster, the product becomes ``R.call_tir(product, (x, w))``.

Requires: nothing; the pass declines products of anything but floating-point matrices, or equal
batches of matrices, of static shape, and lookups of anything but rows. Guarantees: no other product
and no lookup of rows of a matrix is left.
Runs after: the split into forward and backward (TVM's Gradient does not go through external calls).
Runs before: LegalizeOps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.core.decisions import Rule, decided, sizes_vary
from tvmbridge.kernels.aten_call import call_overload, packed_call
from tvmbridge.kernels.choice import product_kernel
from tvmbridge.kernels.matmul import MATMUL, ONEDNN_MATMUL, View, matmul_spec
from tvmbridge.kernels.product_form import form_of
from tvmbridge.kernels.product_loops import MULTIPLIED, TRANSPOSED, Loops, fastest
from tvmbridge.passes.base import (
    PERMUTATION,
    PassReport,
    RelaxPass,
    bindings_of,
    dtype_of,
    is_call,
    readers_of,
    shape_of,
)
from tvmbridge.passes.relax.views import viewed
from tvmbridge.schedules.alone import multiplication, this_machine, transposition
from tvmbridge.schedules.products import product

HALVES = ("float16", "bfloat16")
_LOOPS = Loops(transposition, multiplication)

_VIEWS = (PERMUTATION, "relax.reshape", "relax.expand_dims")

# The dtypes of the products that become calls.
_DTYPES = (*HALVES, "float32", "float64")


@dataclass(frozen=True)
class DispatchKernels(RelaxPass):
    """Replace matrix products and embedding lookups by calls of PyTorch's kernels.

    Args:
        fuse_bias: dtypes of products whose kernel also adds the bias, if nothing else reads the
            product without it. In half precision that saves a rounding. If the sum is a result of
            the function, the kernel adds the bias for every dtype.
        measure: whether to measure on this machine if a library, or loops of tvmbridge, multiply
            each shape fastest; otherwise the library behind ``torch.mm`` is called.
    """

    fuse_bias: tuple[str, ...] = HALVES
    measure: bool = False

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        mutator = _KernelMutator(mod, self, report)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                mutator.biased = _biased_products(function, self)
                mutator.builder_.update_func(name, mutator.visit_expr(function))
        return mutator.builder_.get()


def _biased_products(
    function: relax.Function, options: DispatchKernels
) -> dict[relax.Var, relax.Call]:
    """Return the products whose only reader adds a bias vector.

    Keys are the variable of the product and the variable that the bias is added to, which may be a
    reshape of the product.
    """
    bound, readers = bindings_of(function), readers_of(function)
    found: dict[relax.Var, relax.Call] = {}
    for var, value in bound.items():
        if not is_call(value, "relax.add"):
            continue
        product, bias = value.args
        path = [product]
        if is_call(bound.get(product), "relax.reshape"):
            path.append(bound[product].args[0])
        call = bound.get(path[-1])
        if not is_call(call, "relax.matmul") or any(len(readers[v]) != 1 for v in path):
            continue
        shape, sum_shape = shape_of(call), shape_of(value)
        if shape is None or len(shape) != 2 or shape_of(bias) != shape[1:]:
            continue
        # If loops read the sum, they add the bias at no cost.
        is_last = all(
            r is None or isinstance(bound[r], relax.Tuple | relax.Var) for r in readers[var]
        )
        allowed = _DTYPES if is_last else options.fuse_bias
        if sum_shape is None or sum_shape[-1:] != shape[1:]:
            continue
        if _no_product_of_matrices(call, allowed) is None:
            found |= dict.fromkeys(path, call)
    return found


def _no_product_of_matrices(call: relax.Call, allowed: Sequence[str]) -> str | None:
    """Return why the kernel cannot compute a ``relax.matmul``; None if it can."""
    shapes = [shape_of(operand) for operand in call.args]
    left, right = shapes
    if left is None or right is None:
        return "the shapes are not static"
    if min(len(left), len(right)) < 2:
        return "an operand is a vector"
    if left[:-2] != right[:-2]:
        return "the batch is broadcast"
    dtypes = {dtype_of(e) for e in (*call.args, call)}
    if len(dtypes) > 1 or not dtypes <= set(allowed):
        return f"the dtype is {', '.join(sorted(dtypes))}"
    return None


@mutator
class _KernelMutator(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, options: DispatchKernels, report: PassReport) -> None:
        super().__init__(mod)
        self.options = options
        self.biased: dict[relax.Var, relax.Call] = {}
        self.report = report

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        # The call for the addition, which is the only reader, computes the product too.
        if binding.var not in self.biased:
            super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if is_call(call, "relax.add") and call.args[0] in self.biased:
            product = self.biased[call.args[0]]
            operands = [self.visit_expr(a) for a in (*product.args, call.args[1])]
            result = self._product(operands, product)
            if shape_of(call) == shape_of(product):
                return result
            return relax.op.reshape(self.builder_.emit(result), shape_of(call))
        call = self.builder_.normalize(super().visit_call_(call))
        if is_call(call, "relax.matmul"):
            reason = _no_product_of_matrices(call, _DTYPES)
            if reason is None:
                return self._product(list(call.args), call)
            self.report.decline("matmul", reason)
        elif is_call(call, "relax.take"):
            return self._take(call)
        elif is_call(call, "relax.grad.take_backward"):
            return self._take_backward(call)
        return call

    def _product(self, operands: list[relax.Expr], result: relax.Call) -> relax.Expr:
        self.report.rewrote()
        bases, views = zip(*(self._fold_views(o) for o in operands[:2]), strict=True)
        ours = self._in_loops(bases, views, operands[2:], result)
        if ours is not None:
            return ours
        spec = matmul_spec(views, _flatten_batch(_extents(result)))
        tensors = [*bases, *operands[2:]]
        kernel = product_kernel(
            self.options.measure, dtype_of(result), spec, [_extents(t) for t in tensors]
        )
        if kernel:
            return packed_call(kernel, spec, tensors, result.ty)
        arguments = relax.Tuple([tvm.ir.StringImm(spec), *tensors])
        return relax.op.call_dps_packed(MATMUL, arguments, out_ty=result.ty)

    def _in_loops(
        self,
        bases: Sequence[relax.Expr],
        views: Sequence[View],
        bias: Sequence[relax.Expr],
        result: relax.Call,
    ) -> relax.Expr | None:
        """Return the product computed, or one operand transposed, by loops, if that is faster.

        None if calling the library alone is faster, or may not be measured.
        """
        if not self.options.measure or dtype_of(result) != "float32":
            return None
        left, right = ((_extents(b), v) for b, v in zip(bases, views, strict=True))
        form = form_of(left, right, _flatten_batch(_extents(result)))
        if form is None:
            return None
        multiply = not bias and not sizes_vary()
        way = decided(Rule.MIDDLE, lambda: fastest(form, _LOOPS, multiply=multiply))
        if way == MULTIPLIED:
            callee = self.builder_.add_func(product(form, this_machine()), "product")
            operands = [self._shaped(b, s) for b, s in zip(bases, form.shapes, strict=False)]
            found = relax.call_tir(callee, operands, relax.TensorType(form.shapes[2], "float32"))
            return self._shaped(self.builder_.emit(found), _extents(result))
        if way == TRANSPOSED:
            copy = self.builder_.emit(relax.op.permute_dims(self._shaped(bases[0], form.shapes[0])))
            spec = matmul_spec((None, views[1]), _extents(result))
            return packed_call(ONEDNN_MATMUL, spec, [copy, bases[1], *bias], result.ty)
        return None

    def _shaped(self, tensor: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        if shape_of(tensor) == shape:
            return tensor
        return self.builder_.emit(relax.op.reshape(tensor, shape))

    def _fold_views(self, operand: relax.Expr) -> tuple[relax.Expr, View]:
        """Return the tensor that ``operand`` is a view of, and the view as a matrix or batch.

        PyTorch computes the strides on meta tensors. If a reshape needs a copy, TVM copies, and the
        view begins at the copy.
        """
        chain = [operand]
        calls: list[relax.Call] = []
        while isinstance(chain[-1], relax.Var):
            value = self.lookup_binding(chain[-1])
            if not any(is_call(value, name) for name in _VIEWS):
                break
            if shape_of(value.args[0]) is None:
                break
            calls.append(value)
            chain.append(value.args[0])
        target = _flatten_batch(_extents(operand))
        for depth in range(len(calls), -1, -1):
            view = _meta_view(chain[depth], calls[:depth][::-1], target)
            if view is not None:
                plain = view.is_contiguous() and tuple(view.shape) == shape_of(chain[depth])
                return chain[depth], None if plain else (tuple(view.shape), view.stride())
        raise AssertionError("a contiguous tensor can always be viewed as its own matrices")

    def _take(self, call: relax.Call) -> relax.Expr:
        table, indices = call.args
        if len(shape_of(table) or ()) != 2 or call.attrs.axis is None or int(call.attrs.axis) != 0:
            self.report.decline("take", "not a look-up of rows")
            return call
        if call.attrs.mode != "fast" or dtype_of(indices) not in ("int32", "int64"):
            self.report.decline("take", "not PyTorch's kind of indices")
            return call
        self.report.rewrote()
        first, second = {"tensor": 0}, {"tensor": 1}
        if isinstance(table, relax.Var) and is_call(
            self.lookup_binding(table), "relax.broadcast_to"
        ):
            # Loops read the rows of an expanded table where they are, without a whole table.
            args = [first, [second]]
            return call_overload("aten.index.Tensor", args, call.args, call.ty, compiled=True)
        return call_overload("aten.embedding.default", [first, second], call.args, call.ty)

    def _take_backward(self, call: relax.Call) -> relax.Expr:
        grad, table, indices = call.args
        shape = shape_of(table)
        if shape is None or len(shape) != 2 or int(call.attrs.axis) != 0:
            self.report.decline("take_backward", "not a look-up of rows")
            return call
        self.report.rewrote()
        args = [{"tensor": 0}, {"tensor": 1}, shape[0], -1, False]
        name = "aten.embedding_dense_backward.default"
        return call_overload(name, args, [grad, indices], call.ty)


def _extents(expr: relax.Expr) -> tuple[int, ...]:
    shape = shape_of(expr)
    assert shape is not None, "a view of a tensor whose shape is static"
    return shape


def _flatten_batch(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) <= 3:
        return shape
    count = 1
    for extent in shape[:-2]:
        count *= extent
    return (count, *shape[-2:])


def _meta_view(
    base: relax.Expr, calls: list[relax.Call], target: tuple[int, ...]
) -> torch.Tensor | None:
    """Return contiguous ``base`` viewed by ``calls``, in shape ``target``; None if that copies."""
    tensor = torch.empty(_extents(base), dtype=getattr(torch, dtype_of(base)), device="meta")
    try:
        for call in calls:
            tensor = viewed(tensor, call)
        return tensor.view(target)
    except RuntimeError:
        return None

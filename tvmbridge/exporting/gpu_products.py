"""Compute matrix products by tvmbridge's kernels for NVIDIA's GPUs.

Before::

    lv = R.matmul(x, w)          # float16
    lv1 = R.add(lv, bias)
    lv2 = R.astype(lv1, "float32")
    lv3 = R.nn.gelu(lv2)
    lv4 = R.astype(lv3, "float16")

After::

    lv4 = R.call_tir(product, (x, w, bias), out_ty=R.Tensor((1024, 3072), "float16"))

A product in half precision adds a bias and applies an activation that nothing else reads. The sum
with the bias is rounded once, as by PyTorch's linear layers.

Requires: nothing. Products of integers, and of unequal batches, stay. Guarantees: the results.
Runs after: SpellOutAtenCalls. Runs before: LegalizeOps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import tvm
from tvm import relax

from tvmbridge.kernels.product_form import Form
from tvmbridge.legalize.broadcast import OPAQUE
from tvmbridge.passes.base import (
    PERMUTATION,
    RESHAPES,
    PassReport,
    RelaxPass,
    binding,
    bindings_of,
    dtype_of,
    is_call,
    permutation,
    readers_of,
    shape_of,
    with_bindings,
)
from tvmbridge.schedules.gpu.products import (
    HALVES,
    gpu_product,
    group_tile_for,
    has_product,
    takes_groups,
)

# The activations of a kernel by the operators of Relax.
_ACTIVATIONS = {
    "relax.nn.relu": "relu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.silu": "silu",
}


@dataclass(frozen=True)
class ProductsOnGpu(RelaxPass):
    """Replace products by kernels of tvmbridge, if there is one for their form.

    Args:
        arch: the architecture that the kernels are for, such as ``sm_90a``.
    """

    arch: str

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        builder = relax.BlockBuilder(mod)
        changed = {}
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                changed[name.name_hint] = _Rewriter(
                    self.arch, function, builder, report
                ).rewritten()
        if not report.rewrites:
            return mod
        mod = builder.get()
        for name, function in changed.items():
            mod.update_func(mod.get_global_var(name), function)
        return mod


@dataclass(frozen=True)
class _ProductKernel:
    """A product, and the operators that its kernel computes after it.

    - ``last``: the variable of the last such operator's result.
    - ``bias``: a vector with an element for each column, or None.
    """

    last: relax.Var
    bias: relax.Expr | None = None
    activation: str = "none"


class _Rewriter:
    def __init__(
        self,
        arch: str,
        function: relax.Function,
        builder: relax.BlockBuilder,
        report: PassReport,
    ) -> None:
        self.arch = arch
        self.function, self.builder, self.report = function, builder, report
        self.bound: Mapping[relax.Var, relax.Expr] = bindings_of(function)
        self.readers = readers_of(function)

    def rewritten(self) -> relax.Function:
        """Return the function with kernels; operators that nothing reads any more stay."""
        replaced: dict[relax.Var, list[relax.Binding]] = {}
        for var, value in self.bound.items():
            if is_call(value, "relax.matmul"):
                product = self._with_epilogue(var, dtype_of(value))
                bindings = self._kernel(value, product)
                if bindings is not None:
                    replaced[product.last] = bindings
        bindings = list[relax.Binding]()
        for var, value in self.bound.items():
            bindings += replaced.get(var) or [relax.VarBinding(var, value)]
        return with_bindings(self.function, bindings) if replaced else self.function

    def _kernel(self, call: relax.Call, product: _ProductKernel) -> list[relax.Binding] | None:
        """Return the bindings that compute a product by a kernel; None if there is none."""
        found = self._form(*call.args)
        dtype = dtype_of(call)
        if found is None or {*map(dtype_of, call.args)} != {dtype}:
            self.report.decline("matmul", "its operands differ in batch or dtype")
            return None
        form, left, right = found
        if not has_product(form, dtype):
            self.report.decline("matmul", f"there is no kernel for {form} of {dtype}")
            return None
        self.report.rewrote()
        bindings = list[relax.Binding]()

        def shaped(tensor: relax.Expr, shape: Sequence[int], name: str) -> relax.Expr:
            if shape_of(tensor) == tuple(shape):
                return tensor
            bindings.append(self._bound_to(name, relax.op.reshape(tensor, shape)))
            return bindings[-1].var

        shapes = form.shapes
        operands = [shaped(left, shapes[0], "left"), shaped(right, shapes[1], "right")]
        if product.bias is not None:
            operands.append(shaped(product.bias, (form.columns,), "bias"))
        function = gpu_product(
            form,
            dtype,
            bias=product.bias is not None,
            activation=product.activation,
            tile=group_tile_for(form) if takes_groups(form, dtype, self.arch) else None,
        )
        # TVM, which finds no store in it, would fuse it with its neighbours.
        callee = self.builder.add_func(function.with_attr("op_pattern", OPAQUE), "product")
        result = relax.call_tir(callee, operands, relax.TensorType(shapes[2], dtype))
        if shape_of(product.last) == shapes[2]:
            return [*bindings, binding(product.last, result)]
        bindings.append(self._bound_to("product", result))
        reshaped = relax.op.reshape(bindings[-1].var, shape_of(product.last))
        return [*bindings, binding(product.last, reshaped)]

    @staticmethod
    def _bound_to(name: str, value: relax.Expr) -> relax.VarBinding:
        value = relax.BlockBuilder().normalize(value)
        return relax.VarBinding(relax.DataflowVar(name, value.ty), value)

    def _form(
        self, left: relax.Expr, right: relax.Expr
    ) -> tuple[Form, relax.Expr, relax.Expr] | None:
        """Return the form of a product and its operands, the right one without a transposition."""
        a, b = shape_of(left), shape_of(right)
        if a is None or b is None or min(len(a), len(b)) < 2 or not prod(a) or not prod(b):
            return None
        batch, (rows, depth), columns = a[:-2], a[-2:], b[-1]
        right, transposed = self._untransposed(right)
        if prod(b[:-2]) == 1:
            return Form(prod(batch) * rows, columns, depth, False, transposed), left, right
        shared = prod(batch) == 1
        if batch != b[:-2] and not shared:
            return None
        form = Form(rows, columns, depth, False, transposed, prod(b[:-2]), shared)
        return form, left, right

    def _untransposed(self, operand: relax.Expr) -> tuple[relax.Expr, bool]:
        value = self.bound.get(operand) if isinstance(operand, relax.Var) else None
        if not is_call(value, PERMUTATION):
            return operand, False
        rank = len(shape_of(operand) or ())
        if permutation(value) != [*range(rank - 2), rank - 1, rank - 2]:
            return operand, False
        return value.args[0], True

    # ---- the operators after a product ----

    def _with_epilogue(self, var: relax.Var, dtype: str) -> _ProductKernel:
        product = _ProductKernel(var)
        if dtype not in HALVES or prod(shape_of(var) or (0,)) == 0:
            return product
        product = self._with_bias(product)
        return self._with_activation(product, dtype)

    def _with_bias(self, product: _ProductKernel) -> _ProductKernel:
        reader = self._only_reader(product.last)
        value = None if reader is None else self.bound[reader]
        if reader is None or not is_call(value, "relax.add"):
            return product
        bias = value.args[1] if value.args[0].same_as(product.last) else value.args[0]
        shape, columns = shape_of(bias), (shape_of(product.last) or ())[-1]
        is_vector = shape is not None and prod(shape) == columns == shape[-1]
        if not is_vector or self._is_late(bias, product.last):
            return product
        if shape_of(reader) != shape_of(product.last) or dtype_of(bias) != dtype_of(product.last):
            return product
        return replace(product, last=reader, bias=bias)

    def _is_late(self, value: relax.Expr, product: relax.Var) -> bool:
        """Whether ``value`` depends on ``product``."""
        seen, left = set[relax.Var](), list(relax.analysis.free_vars(value))
        while left:
            var = left.pop()
            if var.same_as(product):
                return True
            if var in self.bound and var not in seen:
                seen.add(var)
                left += relax.analysis.free_vars(self.bound[var])
        return False

    def _with_activation(self, product: _ProductKernel, dtype: str) -> _ProductKernel:
        """Return the product with an activation, which is computed in float32."""
        last = self._through_reshapes(product.last)
        wide = self._only_reader(last)
        value = None if wide is None else self.bound[wide]
        if wide is not None and is_call(value, "relax.astype") and dtype_of(wide) == "float32":
            applied = self._only_reader(self._through_reshapes(wide))
        else:
            applied = wide
        value = None if applied is None else self.bound[applied]
        name = getattr(getattr(value, "op", None), "name", "")
        if applied is None or name not in _ACTIVATIONS:
            return product
        activation = _ACTIVATIONS[name]
        if dtype_of(applied) == dtype:
            return replace(product, last=applied, activation=activation)
        narrow = self._only_reader(self._through_reshapes(applied))
        value = None if narrow is None else self.bound[narrow]
        if narrow is None or not is_call(value, "relax.astype") or dtype_of(narrow) != dtype:
            return product
        return replace(product, last=narrow, activation=activation)

    def _through_reshapes(self, var: relax.Var) -> relax.Var:
        reader = self._only_reader(var)
        while reader is not None and getattr(self.bound[reader].op, "name", "") in RESHAPES:
            var = reader
            reader = self._only_reader(var)
        return var

    def _only_reader(self, var: relax.Var) -> relax.Var | None:
        """Return the variable whose value is the only one that reads ``var``, if it is a call."""
        found = self.readers.get(var, [])
        if len(found) != 1 or found[0] is None:
            return None
        return found[0] if isinstance(self.bound[found[0]], relax.Call) else None


__all__ = ["ProductsOnGpu"]

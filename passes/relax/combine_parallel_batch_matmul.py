"""Products that share their left operand become one product with concatenated right operands.

Before::

    q = R.matmul(x, R.permute_dims(w_q))            # x: (rows, depth), w_q: (width_q, depth)
    k = R.matmul(x, R.permute_dims(w_k))
    q1 = R.add(q, b_q)

After::

    w = R.concat((w_q, w_k), axis=0)
    y = R.matmul(x, R.permute_dims(w))
    q = R.strided_slice(y, [1], [0], [width_q])
    k = R.strided_slice(y, [1], [width_q], [width_q + width_k])
    q1 = R.add(q, b_q)

Left operands count as the same if they are equal reshapes and transposes of one tensor. Right
operands are concatenated before they are transposed, so that the weights of linear layers are
joined by whole rows. TVM's ``CombineParallelMatmul`` does neither, fails if a bias is a scalar or
has one element, and cannot exclude a single weight.

Biases are added after the slices, because one kernel then computes slice, bias and layout together.
With ``join_biases`` the biases are concatenated too, and added to the combined product.

Requires: nothing; products of anything but matrices of static shape are declined.
Guarantees: the combined products have the same results up to rounding.
Runs after: common subexpression elimination. Runs before: DispatchKernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    bindings_of,
    is_call,
    map_functions,
    readers_of,
    shape_of,
)
from tvmbridge.passes.relax.parallel_products import (
    ParallelProducts,
    Product,
    ProductGroup,
    find_groups,
)


@dataclass(frozen=True)
class CombineParallelBatchMatmul(RelaxPass):
    """Combine products that share their left operand.

    Args:
        min_products: the smallest number of different right operands that is combined.
        weight_refusal: called with the name of a parameter; returns why it must not be
            concatenated, or None if it may be. If it is given, right operands that are computed at
            each call are not concatenated; without it every right operand may be.
        group_refusal: called with a group of products; returns why combining them is not worth it,
            or None if it is.
        join_biases: whether to concatenate also the biases of the products of a group.
    """

    min_products: int = 2
    weight_refusal: Callable[[str], str | None] | None = None
    group_refusal: Callable[[ParallelProducts], str | None] | None = None
    join_biases: bool = False

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            groups = find_groups(
                function, self.min_products, self.weight_refusal, self.group_refusal, report
            )
            if not groups:
                return function
            additions = _Additions(function, self.weight_refusal) if self.join_biases else None
            return _CombineMutator(groups, additions, report).visit_expr(function)

        return map_functions(mod, rewrite)


class _Additions:
    """The biases of a function: vectors added to a product by the only reader of that product.

    A bias must be a parameter that may be concatenated, or a constant.
    """

    def __init__(
        self, function: relax.Function, refusal: Callable[[str], str | None] | None
    ) -> None:
        self._parameters = set(function.params)
        self._refusal = refusal
        self._readers = readers_of(function)
        self._added: dict[relax.Var, tuple[relax.Var, relax.Expr]] = {}
        for var, value in bindings_of(function).items():
            if is_call(value, "relax.add"):
                for product, row in (tuple(value.args), tuple(value.args)[::-1]):
                    if isinstance(product, relax.Var):
                        self._added[product] = (var, row)

    def of(self, product: Product) -> tuple[relax.Var, relax.Expr] | None:
        """Return the sum that alone reads ``product``, and its bias; None if there is none."""
        sum_, row = self._added.get(product.var, (None, None))
        if (
            sum_ is None
            or len(self._readers[product.var]) != 1
            or shape_of(row) != (product.width,)
        ):
            return None
        if shape_of(sum_) != shape_of(product.var):
            return None
        if isinstance(row, relax.Var):
            if row not in self._parameters:
                return None
            if self._refusal is not None and self._refusal(row.name) is not None:
                return None
        return sum_, row


@dataclass
class _Plan:
    """How a group of products is rewritten.

    - ``group``: the products.
    - ``rows``: the biases that are added to the combined product; empty if none are joined.
    - ``combined``: the variable of the combined product; None until it has been emitted.
    """

    group: ProductGroup
    rows: list[relax.Expr]
    combined: relax.Var | None = None

    def span(self, weight: relax.Expr) -> tuple[int, int]:
        """Return the columns of the product with ``weight`` in the combined product: begin, end."""
        start = 0
        for product in self.group.different:
            if product.weight.same_as(weight):
                return start, start + product.width
            start += product.width
        raise AssertionError("the weight of a product of the group")


@mutator
class _CombineMutator(PyExprMutator):
    def __init__(
        self, groups: list[ProductGroup], additions: _Additions | None, report: PassReport
    ) -> None:
        super().__init__()
        self.replaced: dict[relax.Var, tuple[_Plan, Product]] = {}
        self.dropped: set[relax.Var] = set()
        self.current: tuple[_Plan, Product] | None = None
        self.report = report
        for group in groups:
            self._plan(group, additions)

    def _plan(self, group: ProductGroup, additions: _Additions | None) -> None:
        distinct = len(group.different) == len(group.products)
        found = [additions.of(p) for p in group.products] if additions and distinct else []
        sums = [s for s in found if s is not None]
        if found and len(sums) == len(found):
            plan = _Plan(group, [row for _, row in sums])
            self.dropped |= {p.var for p in group.products}
            targets = [var for var, _ in sums]
        else:
            if found:
                self.report.decline("biases", "not every product has one row added to it")
            plan = _Plan(group, [])
            targets = [p.var for p in group.products]
        self.replaced |= {
            var: (plan, product) for var, product in zip(targets, group.products, strict=True)
        }

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.dropped:
            return
        self.current = self.replaced.get(binding.var)
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if self.current is None:
            return super().visit_call_(call)
        (plan, product), self.current = self.current, None
        self.report.rewrote()
        if plan.combined is None:
            plan.combined = self._combined(plan)
        start, end = plan.span(product.weight)
        axis = len(shape_of(plan.combined) or ()) - 1
        part = relax.op.strided_slice(plan.combined, axes=[axis], begin=[start], end=[end])
        part = self.builder_.normalize(part)
        shape = shape_of(product.call)
        if shape_of(part) == shape:
            return part
        return relax.op.reshape(self.builder_.emit(part), shape)

    def _combined(self, plan: _Plan) -> relax.Var:
        products = plan.group.different
        first = products[0]
        rank = len(shape_of(first.weight) or ())
        axis = rank - 2 if first.transposed else rank - 1
        emit = self.builder_.emit
        right = emit(relax.op.concat([self.visit_expr(p.weight) for p in products], axis))
        if first.transposed:
            right = emit(relax.op.permute_dims(right, [*range(rank - 2), rank - 1, rank - 2]))
        left = self.visit_expr(first.call.args[0])
        total = emit(relax.op.matmul(left, right, first.call.attrs.out_dtype))
        if plan.rows:
            row = emit(relax.op.concat([self.visit_expr(r) for r in plan.rows], 0))
            total = emit(relax.op.add(total, row))
        return total

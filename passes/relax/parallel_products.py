"""Find groups of products with a common left operand, for CombineParallelBatchMatmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tvm import relax

from tvmbridge.passes.base import PassReport, dtype_of, is_call, shape_of

# An operand as a view: the tensor that is viewed, and the reshapes and transposes, in order.
_Step = tuple[str, tuple[int, ...]]
Views = tuple[relax.Expr, tuple[_Step, ...]]


@dataclass(frozen=True)
class ParallelProducts:
    """A group of products with a common left operand, before they are combined.

    - ``names``: the names of the parameters that are the right operands; empty strings for other
      expressions.
    - ``left``: the shape of the left operand, ``(..., rows, depth)``.
    - ``batch``, ``widths``: the right operands have the shapes ``(*batch, depth, width)``.
    - ``transposed``: whether the right operands are transposes of weights of shapes
      ``(*batch, width, depth)``, as in linear layers.
    - ``dtype``: the dtype of the products.
    """

    names: tuple[str, ...]
    left: tuple[int, ...]
    batch: tuple[int, ...]
    widths: tuple[int, ...]
    transposed: bool
    dtype: str


@dataclass(frozen=True)
class Product:
    """A product in a function.

    - ``var``: the variable that is bound to it; ``call`` is its call.
    - ``weight``: the tensor that the right operand is, or is the transpose of.
    - ``transposed``: whether the right operand is the transpose of ``weight``.
    - ``key``: equal for products that can be combined; empty if an operand is no matrix.
    """

    var: relax.Var
    call: relax.Call
    weight: relax.Expr
    transposed: bool
    key: tuple[object, ...]

    @property
    def width(self) -> int:
        """The number of columns of the right operand."""
        return (shape_of(self.call.args[1]) or ())[-1]

    @property
    def label(self) -> str:
        """The product's name in reports, by its right operand."""
        return f"product with {getattr(self.weight, 'name', 'a constant')}"


@dataclass(frozen=True)
class ProductGroup:
    """Products that become one.

    - ``products``: the products in the order of the function.
    - ``different``: the first product with each right operand.
    """

    products: tuple[Product, ...]
    different: tuple[Product, ...]


def find_groups(
    function: relax.Function,
    min_products: int,
    weight_refusal: Callable[[str], str | None] | None,
    group_refusal: Callable[[ParallelProducts], str | None] | None,
    report: PassReport,
) -> list[ProductGroup]:
    """Return the groups of products in ``function`` that may be combined.

    Args:
        weight_refusal: called with the name of a parameter; returns why it must not be
            concatenated, or None. If it is given, other right operands are declined.
        group_refusal: called with a group; returns why combining it is not worth it, or None.
    """
    if not isinstance(function.body, relax.SeqExpr):
        return []
    groups = []
    parameters = set(function.params)
    bound: dict[relax.Var, relax.Expr] = {}
    for block in function.body.blocks:
        order = {b.var: i for i, b in enumerate(block.bindings)}
        bound |= {b.var: b.value for b in block.bindings if isinstance(b, relax.VarBinding)}
        for alike in _with_a_common_left_operand(block, bound):
            able = _concatenable(alike, order, parameters, weight_refusal, report)
            for products in _by_form(able):
                found = _group(products, min_products, group_refusal, parameters, report)
                if found is not None:
                    groups.append(found)
    return groups


def _with_a_common_left_operand(
    block: relax.BindingBlock, bound: Mapping[relax.Var, relax.Expr]
) -> Iterator[list[Product]]:
    found: dict[tuple[object, ...], list[Product]] = {}
    for binding in block.bindings:
        value = binding.value
        if not isinstance(binding, relax.VarBinding) or not is_call(value, "relax.matmul"):
            continue
        left, right = value.args
        weight, transposed = _weight(right, bound)
        product = Product(binding.var, value, weight, transposed, _form(value, transposed))
        found.setdefault(_left_key(left, right, bound), []).append(product)
    return (alike for alike in found.values() if len(alike) > 1)


def _left_key(
    left: relax.Expr, right: relax.Expr, bound: Mapping[relax.Var, relax.Expr]
) -> tuple[object, ...]:
    """Return a key that is equal for equal left operands: one tensor, or equal views of it.

    A reshape that only flattens leading dimensions counts as the tensor itself.
    """
    root, steps = views_of(left, bound)
    shape = shape_of(root)
    if len(shape_of(right) or ()) == 2 and shape is not None and len(steps) == 1:
        ((kind, extents),) = steps
        # Flattening the leading dimensions leaves the rows as they are.
        if kind == "reshape" and extents and shape and extents[-1] == shape[-1]:
            steps = ()
    return root, steps


def _form(call: relax.Call, transposed: bool) -> tuple[object, ...]:
    """Return a key that is equal for products that can be combined; empty without matrices."""
    shapes = [shape_of(operand) for operand in call.args]
    if any(s is None or len(s) < 2 for s in shapes):
        return ()
    right = shapes[1] or ()
    dtypes = tuple(dtype_of(e) for e in (*call.args, call))
    # The left batch dimensions decide how batches are broadcast.
    left_batch = (shapes[0] or ())[:-2] if len(right) > 2 else ()
    return (right[:-1], left_batch, transposed, dtypes, str(call.attrs.out_dtype))


def views_of(expr: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> Views:
    """Return the tensor that ``expr`` views, and the reshapes and transposes that lead to it.

    Equal views have equal results.
    """
    steps: list[_Step] = []
    while isinstance(expr, relax.Var):
        value = bound.get(expr)
        if isinstance(value, relax.Var):
            expr = value
            continue
        step = _step(value, shape_of(expr))
        if step is None or not isinstance(value, relax.Call):
            break
        expr = value.args[0]
        steps = _before(step, steps)
    if steps and steps[0] == ("reshape", shape_of(expr)):
        steps = steps[1:]
    return expr, tuple(steps)


def _step(value: relax.Expr | None, shape: tuple[int, ...] | None) -> _Step | None:
    """Describe ``value``, of shape ``shape``, as a view of its operand; None if it is no view."""
    if not isinstance(value, relax.Call) or shape is None:
        return None
    if is_call(value, "relax.reshape") and shape_of(value.args[0]) is not None:
        return "reshape", shape
    if not is_call(value, "relax.permute_dims"):
        return None
    rank, axes = len(shape), value.attrs.axes
    order = range(rank)[::-1] if axes is None else [int(a) % rank for a in axes]
    return "permute", tuple(order)


def _before(step: _Step, steps: list[_Step]) -> list[_Step]:
    """Return the views ``step`` and then ``steps``, in the shortest form."""
    kind, extents = step
    if not steps or steps[0][0] != kind:
        return [step, *steps]
    if kind == "reshape":
        return steps
    composed = tuple(extents[axis] for axis in steps[0][1])
    rest = steps[1:]
    return rest if composed == tuple(range(len(composed))) else [(kind, composed), *rest]


def _weight(right: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> tuple[relax.Expr, bool]:
    """Return the tensor that ``right`` is or is the transpose of, and whether it is transposed."""
    root, steps = views_of(right, bound)
    rank = len(shape_of(right) or ())
    if not steps:
        return root, False
    if rank >= 2 and steps == (("permute", (*range(rank - 2), rank - 1, rank - 2)),):
        return root, True
    return right, False


def _concatenable(
    products: list[Product],
    order: Mapping[relax.Var, int],
    parameters: set[relax.Var],
    weight_refusal: Callable[[str], str | None] | None,
    report: PassReport,
) -> list[Product]:
    first = order[products[0].var]
    able = []
    for product in products:
        weight = product.weight
        reason: str | None = None
        if not product.key:
            reason = "not a product of matrices of static shape"
        elif order.get(weight, -1) > first:
            reason = "its right operand is computed after the first of the products"
        elif weight_refusal is not None and isinstance(weight, relax.Var):
            if weight in parameters:
                reason = weight_refusal(weight.name)
            else:
                reason = "its right operand is computed at each call"
        if reason is None:
            able.append(product)
        else:
            report.decline(product.label, reason)
    return able


def _by_form(products: list[Product]) -> list[list[Product]]:
    forms: dict[tuple[object, ...], list[Product]] = {}
    for product in products:
        forms.setdefault(product.key, []).append(product)
    return list(forms.values())


def _group(
    products: list[Product],
    min_products: int,
    group_refusal: Callable[[ParallelProducts], str | None] | None,
    parameters: set[relax.Var],
    report: PassReport,
) -> ProductGroup | None:
    different = list({p.weight: p for p in reversed(products)}.values())[::-1]
    first = products[0]
    left, right = (shape_of(operand) or () for operand in first.call.args)
    description = ParallelProducts(
        names=tuple(p.weight.name if p.weight in parameters else "" for p in different),
        left=left,
        batch=right[:-2],
        widths=tuple(p.width for p in different),
        transposed=first.transposed,
        dtype=dtype_of(first.call),
    )
    reason: str | None = None
    if len(different) < min_products:
        reason = f"fewer than {min_products} such products"
    elif group_refusal is not None:
        reason = group_refusal(description)
    if reason is None:
        return ProductGroup(tuple(products), tuple(different))
    report.decline(", ".join(p.label for p in different), reason)
    return None

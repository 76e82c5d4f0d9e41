"""Products with frozen weights become kernel calls that read packed weights, with bias and GELU.

Before (``w`` is frozen)::

    lv = R.matmul(x, R.permute_dims(w))
    lv1 = R.reshape(R.add(lv, b), (1, 14, 3072))
    y = R.nn.gelu(lv1)

After::

    lv = R.call_pure_packed("tvmbridge.packed_matmul", spec, x, packed_0, b)
    y = R.reshape(lv, (1, 14, 3072))

where ``packed_0``, a new parameter with one integer, identifies the packed weight
(``tvmbridge.kernels.packed``).

Requires: products as :func:`frozen_products` finds them. Guarantees: one new parameter for each of
the packings. Runs after: LiftFrozen. Runs before: DispatchKernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.aten_call import packed_call
from tvmbridge.kernels.packed import NOTHING, ONEDNN, PACKED_MATMUL, WeightPacking, packed_spec
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    bindings_of,
    dtype_of,
    free_prefix,
    is_call,
    map_functions,
    readers_of,
    shape_of,
    with_body,
    with_span,
)

# oneDNN's relu is missing because it turns NaN into 0.
_ACTIVATIONS = {
    "relax.nn.gelu": ("gelu", "none"),
    "relax.nn.gelu_tanh": ("gelu", "tanh"),
}

Packing = TypeVar("Packing")


@dataclass(frozen=True)
class FrozenProduct:
    """A matrix product whose right operand is the parameter ``weight``, or its transpose.

    - ``weight``: the name of the parameter.
    - ``transposed``: whether the right operand is the transpose of the parameter.
    - ``rows``: rows of the left operand.
    - ``depth``: columns of the left operand.
    - ``columns``: columns of the right operand.
    """

    weight: str
    transposed: bool
    rows: int
    depth: int
    columns: int


@dataclass(frozen=True)
class PackProducts(RelaxPass):
    """Replace products by calls of the kernel that reads packed weights.

    Args:
        packings: pairs of the name of a weight and how it is packed.
    """

    packings: tuple[tuple[str, WeightPacking], ...]

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: self._packed(f, report), "forward")

    def _packed(self, forward: relax.Function, report: PassReport) -> relax.Function:
        tickets = tickets_of(forward, self.packings, "packed_")
        chains = {}
        for found in _chains(forward):
            product = found.product
            for packing, ticket in tickets.items():
                if packing[0] == product.weight and _fits(product, packing[1]):
                    last, then = found.end(packing[1])
                    chains[last] = _Packed(found, then, ticket)
                    report.rewrote()
        body = _PackMutator(chains).visit_expr(forward.body)
        return with_body(forward, body, [*forward.params, *tickets.values()])


def tickets_of(
    forward: relax.Function, packings: Sequence[Packing], prefix: str
) -> dict[Packing, relax.Var]:
    """Return a new parameter for each packed weight, named by ``prefix`` and a number."""
    prefix = free_prefix(prefix, [p.name for p in forward.params])
    type_ = relax.TensorType([1], "int64")
    return {packing: relax.Var(f"{prefix}{i}", type_) for i, packing in enumerate(packings)}


def _fits(product: FrozenProduct, packing: WeightPacking) -> bool:
    return (product.rows, product.transposed) == (packing.rows, packing.transposed)


@dataclass(frozen=True)
class _Chain:
    """A product, the bias that is added to it, and the activation that follows.

    - ``product``: describes the product; ``call`` is its call.
    - ``bias``: the bias; None if there is none.
    - ``sum``: the variable of the product with bias.
    - ``then``: the activation and its variant; ``NOTHING`` if there is none.
    - ``last``: the variable of the activation's result, or else ``sum``.
    """

    product: FrozenProduct
    call: relax.Call
    bias: relax.Expr | None
    sum: relax.Var
    then: tuple[str, str]
    last: relax.Var

    def end(self, packing: WeightPacking) -> tuple[relax.Var, tuple[str, str]]:
        """Return the variable that the kernel's result replaces, and the kernel's activation.

        Only the library oneDNN computes activations.
        """
        return (self.last, self.then) if packing.library == ONEDNN else (self.sum, NOTHING)


@dataclass(frozen=True)
class _Packed:
    chain: _Chain
    then: tuple[str, str]
    ticket: relax.Var


def frozen_products(forward: relax.Function, frozen: tuple[str, ...]) -> tuple[FrozenProduct, ...]:
    """Return the products of ``forward`` whose right operand is one of the frozen parameters."""
    found = {c.product: None for c in _chains(forward) if c.product.weight in frozen}
    return tuple(found)


def _chains(forward: relax.Function) -> list[_Chain]:
    bound = bindings_of(forward)
    readers, parameters = readers_of(forward), set(forward.params)

    def only_reader(var: relax.Var) -> relax.Var | None:
        return readers[var][0] if len(readers[var]) == 1 else None

    found = []
    for var, value in bound.items():
        product = _product(value, bound, parameters) if is_call(value, "relax.matmul") else None
        if product is None:
            continue
        sum_, bias = var, None
        after = only_reader(var)
        if after is not None and is_call(bound[after], "relax.add"):
            operand, row = bound[after].args
            if operand.same_as(var) and shape_of(row) == (product.columns,):
                sum_, bias = after, row
        after = only_reader(sum_)
        if after is not None and is_call(bound[after], "relax.reshape"):
            after = only_reader(after)
        then = NOTHING if after is None else _activation(bound[after])
        last = sum_ if after is None or then is NOTHING else after
        found.append(_Chain(product, value, bias, sum_, then, last))
    return found


def _activation(value: relax.Expr) -> tuple[str, str]:
    return _ACTIVATIONS.get(getattr(getattr(value, "op", None), "name", ""), NOTHING)


def _product(
    call: relax.Call, bound: dict[relax.Var, relax.Expr], parameters: set[relax.Var]
) -> FrozenProduct | None:
    left, right = call.args
    shapes = shape_of(left), shape_of(right)
    if None in shapes or len(shapes[0] or ()) != 2 or len(shapes[1] or ()) != 2:
        return None
    if {dtype_of(e) for e in (left, right, call)} != {"float32"}:
        return None
    value = bound.get(right) if isinstance(right, relax.Var) else None
    weight = value.args[0] if is_call(value, "relax.permute_dims") else right
    if weight not in parameters:
        return None
    (rows, depth), (_, columns) = shapes  # type: ignore[misc]
    return FrozenProduct(weight.name, not weight.same_as(right), rows, depth, columns)


@mutator
class _PackMutator(PyExprMutator):
    def __init__(self, chains: dict[relax.Var, _Packed]) -> None:
        super().__init__()
        self.chains = chains

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        packed = self.chains.get(binding.var)
        if packed is None:
            super().visit_var_binding_(binding)
            return
        chain = packed.chain
        operands = [self.visit_expr(chain.call.args[0]), packed.ticket]
        if chain.bias is not None:
            operands.append(self.visit_expr(chain.bias))
        spec = packed_spec(chain.product.rows, packed.then)
        value = packed_call(PACKED_MATMUL, spec, operands, chain.sum.ty)
        shape = shape_of(binding.var)
        if shape != shape_of(chain.sum):
            value = relax.op.reshape(self.builder_.emit(value), list(shape or ()))
        value = self.builder_.normalize(with_span(value, binding.value.span))
        self.builder_.emit_normalized(relax.VarBinding(binding.var, value))

"""A function returns a product with padded rows itself, instead of a copy without the padding.

Before::

    lv = R.permute_dims(w, axes=[1, 0])          # w: (50257, 768)
    lv1 = R.matmul(x, lv)
    lv2 = R.reshape(lv1, (8, 128, 50257))
    gv = (lv2,)

After::

    lv = R.nn.pad(w, [0, 7, 0, 0])
    lv1 = R.permute_dims(lv, axes=[1, 0])
    lv2 = R.matmul(x, lv1)
    gv = (lv2,)                                  # attribute: result 0 is (8, 128, 50257) of it

The caller reads the result by strides. It copies results out of a CUDA graph's memory anyway, and
that copy leaves the padding behind: the logits of a language model are copied once, not twice.

Requires: one dataflow block, static shapes. Guarantees: the other results stay as they are. A
product that something else reads is left to PadProducts.
Runs after: results have the layout of eager PyTorch. Runs before: PadProducts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    bindings_of,
    flat_results,
    is_call,
    map_functions,
    shape_of,
    transposed_of,
)
from tvmbridge.passes.relax.pad_products import padded_product, padding_of, sizes_of

_ATTRIBUTE = "tvmbridge.padded"


def padded_results(function: relax.Function) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return, by number, the shape of each padded result and the length of its padded rows."""
    written = (function.attrs or {}).get(_ATTRIBUTE)
    found = {} if written is None else json.loads(str(written))
    return {int(number): (tuple(shape), pitch) for number, (shape, pitch) in found.items()}


@dataclass(frozen=True)
class ReturnPadded(RelaxPass):
    """Return products with padded rows from one function, without the copy that cuts them.

    Args:
        kept: numbers of results that stay as they are.
        function: the name of the function.
    """

    kept: frozenset[int] = frozenset()
    function: str = "forward"

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            products = _products(function, self.kept)
            report.rewrote(len(products))
            return _returning(function, products) if products else function

        return map_functions(mod, rewrite, self.function)


@dataclass(frozen=True)
class _PaddedProduct:
    """A result that is a product with unaligned rows.

    - ``chain``: the variables of the product, of its sum with a bias if there is one, and of the
      result, in order.
    - ``bias``: the bias, a vector; None if there is none.
    - ``more``: the padding of rows, depth and columns.
    """

    chain: tuple[relax.Var, ...]
    call: relax.Call
    stored: tuple[relax.Expr | None, ...]
    bias: relax.Expr | None
    more: tuple[int, int, int]

    @property
    def pitch(self) -> int:
        """The length of the product's padded rows."""
        columns: int = self.call.args[1].ty.shape.values[1].value
        return columns + self.more[2]

    def emit(self, builder: relax.BlockBuilder) -> relax.Var:
        """Emit the product, and its sum with the bias, with padded rows."""
        product = builder.emit(padded_product(builder, self.call, self.stored, self.more))
        if self.bias is None:
            return product
        wide = builder.emit(relax.op.nn.pad(self.bias, [0, self.more[2]]))
        return builder.emit(relax.op.add(product, wide))


def _products(function: relax.Function, kept: Collection[int]) -> dict[int, _PaddedProduct]:
    """Return the results that are padded products, by number."""
    bound, results = bindings_of(function), flat_results(function)
    uses: Counter[relax.Expr] = Counter(results)
    for var, value in bound.items():
        if var != function.body.body:
            uses.update(relax.analysis.free_vars(value))
    found = {}
    for number, result in enumerate(results):
        product = None if number in kept else _product(result, bound)
        if product is not None and all(uses[var] == 1 for var in product.chain):
            found[number] = product
    return found


def _product(result: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> _PaddedProduct | None:
    shape, value, chain = shape_of(result), bound.get(result), [result]
    if value is not None and is_call(value, "relax.reshape"):
        chain.append(value.args[0])
        value = bound.get(chain[-1])
    bias = None
    if is_call(value, "relax.add"):
        for product, other in (value.args, value.args[::-1]):
            if sizes_of(bound.get(product)) is not None:
                chain.append(product)
                value, bias = bound[product], other
                break
    sizes = sizes_of(value)
    if value is None or sizes is None or not shape or shape[-1] != sizes[2]:
        return None
    if bias is not None and shape_of(bias) != (sizes[2],):
        return None
    stored = tuple(transposed_of(operand, bound.get) for operand in value.args)
    more = padding_of(*sizes, stored)
    if more is None or more[0] or not more[2]:
        return None
    return _PaddedProduct(tuple(reversed(chain)), value, stored, bias, more)


def _returning(function: relax.Function, products: Mapping[int, _PaddedProduct]) -> relax.Function:
    left_out = {var for product in products.values() for var in product.chain}
    results = flat_results(function)
    builder = relax.BlockBuilder()
    name = str(function.attrs["global_symbol"])
    with builder.function(name, function.params, attrs=dict(function.attrs)):
        with builder.dataflow():
            for binding in function.body.blocks[0].bindings:
                if binding.var not in left_out and binding.var != function.body.body:
                    builder.emit_normalized(binding)
            fields = [
                products[n].emit(builder) if n in products else result
                for n, result in enumerate(results)
            ]
            output = builder.emit_output(relax.Tuple(fields))
        builder.emit_func_output(output)
    padded = {n: (shape_of(results[n]), p.pitch) for n, p in products.items()}
    whole = builder.get()[name].with_attr(_ATTRIBUTE, json.dumps(padded))
    return copy_with_new_vars(whole)

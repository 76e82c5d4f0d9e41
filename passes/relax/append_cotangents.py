"""Add the scalar that TVM's Gradient differentiates: the sum of outputs times their cotangents.

Before::

    def main(x, w):
        return (y, z)

After::

    def main(x, w, ct_0, ct_1):
        return (R.sum(y * ct_0) + R.sum(z * ct_1), y, z)

The gradient of that scalar is the product of the cotangents with the Jacobian, which backward has
to return.

Requires: one dataflow block whose result is a tensor or a flat tuple of tensors.
Guarantees: the first item of the result is a scalar. Runs before: Gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    dtype_of,
    flat_results,
    map_functions,
    shape_of,
)

COTANGENT_PREFIX = "ct_"


@dataclass(frozen=True)
class AppendCotangents(RelaxPass):
    """Append a cotangent parameter for each of ``outputs`` and return the scalar first.

    Args:
        outputs: numbers of the results that have a cotangent; they must be floating point.
        prefix: the name of a cotangent is ``prefix`` and the number of its output.
    """

    outputs: tuple[int, ...]
    prefix: str = COTANGENT_PREFIX

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: self._append(f, report))

    def _append(self, function: relax.Function, report: PassReport) -> relax.Function:
        if not self.outputs:
            raise ValueError("no output has a cotangent: there is no scalar to differentiate")
        results = flat_results(function)
        cotangents = [
            relax.Var(
                f"{self.prefix}{i}", relax.TensorType(shape_of(results[i]), dtype_of(results[i]))
            )
            for i in self.outputs
        ]
        builder = relax.BlockBuilder()
        parameters = [*function.params, *cotangents]
        with builder.function("main", parameters, attrs=dict(function.attrs or {})):
            with builder.dataflow():
                for binding in function.body.blocks[0].bindings:
                    builder.emit_normalized(binding)
                terms = [
                    builder.emit(relax.op.sum(builder.emit(relax.op.multiply(results[i], ct))))
                    for i, ct in zip(self.outputs, cotangents, strict=True)
                ]
                total = terms[0]
                for term in terms[1:]:
                    total = builder.emit(_add(builder, total, term))
                total = builder.emit_output(total)
                outputs = [builder.emit_output(r) for r in results]
            builder.emit_func_output(relax.Tuple([total, *outputs]))
        report.rewrote(len(cotangents))
        return builder.get()["main"]


def _add(builder: relax.BlockBuilder, total: relax.Expr, term: relax.Expr) -> relax.Expr:
    """Return ``total + term``, cast to the dtype of ``total``: outputs may differ in precision."""
    if dtype_of(total) != dtype_of(term):
        term = builder.emit(relax.op.astype(term, dtype_of(total)))
    return relax.op.add(total, term)

"""Sum products of half precision in float32, as PyTorch's kernels do.

Before, of float16::

    lv = R.matmul(x, w)

After::

    a = R.astype(x, "float32")
    b = R.astype(w, "float32")
    c = R.matmul(a, b)
    lv = R.astype(c, "float16")

Requires: nothing. Guarantees: each element is rounded to half precision once. Runs after:
ProductsInLoops. Runs before: LegalizeOps.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls

_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class WideProducts(RelaxPass):
    """Multiply matrices of half precision in float32."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            if getattr(call.op, "name", "") != "relax.matmul":
                return call
            call = builder.normalize(call)
            if dtype_of(call) not in _HALVES:
                return call
            report.rewrote()
            wide = [builder.emit(relax.op.astype(a, "float32")) for a in call.args]
            product = builder.emit(relax.op.matmul(*wide))
            return relax.op.astype(product, dtype_of(call))

        return map_calls(mod, rewrite)

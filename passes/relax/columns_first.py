"""Weights that products read as they are become ones that products read transposed.

Before::

    y = R.matmul(x, w)                      # w: (depth, columns)

After::

    w1 = R.permute_dims(w)                  # (columns, depth)
    w2 = R.permute_dims(w1)
    y = R.matmul(x, w2)

Requires: one dataflow block. Guarantees: the results. Runs before: LiftFrozen, which computes w1
once. Kernels for groups of warps read both operands along the depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import (
    PERMUTATION,
    PassReport,
    RelaxPass,
    bindings_of,
    is_call,
    shape_of,
    with_bindings,
)
from tvmbridge.passes.relax.lift_frozen import weights_alone


@dataclass(frozen=True)
class ColumnsFirst(RelaxPass):
    """Transpose the weights of products twice, of which once is at each call.

    Args:
        frozen: names of the parameters whose values do not change.
    """

    frozen: tuple[str, ...]

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        forward = mod["forward"]
        known, bound = weights_alone(forward, self.frozen), bindings_of(forward)
        bindings = list[relax.Binding]()
        for var, value in bound.items():
            weight = value.args[1] if is_call(value, "relax.matmul") else None
            is_plain = (
                weight in known
                and len(shape_of(weight) or ()) == 2
                and not is_call(bound.get(weight), PERMUTATION)
            )
            for _ in range(2 if is_plain else 0):
                call = relax.BlockBuilder().normalize(relax.op.permute_dims(weight))
                weight = relax.DataflowVar("columns_first", call.ty)
                bindings.append(relax.VarBinding(weight, call))
            if is_plain:
                report.rewrote()
                value = relax.op.matmul(value.args[0], weight, value.attrs.out_dtype)
                value = relax.BlockBuilder().normalize(value)
            bindings.append(relax.VarBinding(var, value))
        if not report.rewrites:
            return mod
        functions = {name.name_hint: f for name, f in mod.functions_items()}
        functions["forward"] = with_bindings(forward, bindings)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

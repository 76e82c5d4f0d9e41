"""Forward copies residuals that share memory with an argument or an output.

Before, with one output::

    def forward(x):
        lv = R.sigmoid(x)
        gv = (lv, lv, x)
        return gv

After::

    def forward(x):
        lv = R.sigmoid(x)
        lv1 = clone(lv)                     # clone is a call of PyTorch's kernel
        lv2 = clone(x)
        gv = (lv, lv1, lv2)
        return gv

The user may write into arguments and outputs before backward reads the residuals.

Requires: one dataflow block; forward returns a tuple. Guarantees: no residual shares memory with an
argument or an output; results keep their order. Runs after: fusion, which turns some operators into
views. Runs before: DeclareResults.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import call_overload
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    binding,
    flat_results,
    map_functions,
    storage_root,
    storage_roots,
    with_bindings,
)


@dataclass(frozen=True)
class OwnResiduals(RelaxPass):
    """Copy the residuals of ``forward`` whose memory the user could write.

    Args:
        num_outputs: the number of results of ``forward`` that come before the residuals.
    """

    num_outputs: int

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: self._copying(f, report), "forward")

    def _copying(self, function: relax.Function, report: PassReport) -> relax.Function:
        (block,) = function.body.blocks
        bound = {b.var: b.value for b in block.bindings}
        users = {*function.params, *storage_roots(function)[: self.num_outputs]} - {None}
        results = flat_results(function)
        outputs, residuals = results[: self.num_outputs], results[self.num_outputs :]
        copies: dict[relax.Expr, relax.Var] = {}
        for residual in residuals:
            if residual not in copies and storage_root(residual, bound) in users:
                copies[residual] = relax.DataflowVar("copy", residual.ty)
                report.rewrote()
        if not copies:
            return function
        result = relax.Var("results", function.ret_ty)
        bindings = [
            *(b for b in block.bindings if b.var != function.body.body),
            *(binding(copy, _clone(residual)) for residual, copy in copies.items()),
            binding(result, relax.Tuple([*outputs, *(copies.get(r, r) for r in residuals)])),
        ]
        return with_bindings(function, bindings, result)


def _clone(tensor: relax.Expr) -> relax.Call:
    return call_overload("aten.clone.default", [{"tensor": 0}], [tensor], tensor.ty)

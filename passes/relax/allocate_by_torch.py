"""PyTorch's allocator, which counts and reuses memory, allocates the tensors of compiled functions.

Before::

    alloc = R.builtin.alloc_tensor(R.shape([64, 256]), R.dtype("float32"), 0, R.str("global"))

After::

    alloc = R.call_packed("tvmbridge.empty", R.shape([64, 256]), R.dtype("float32"))

Requires: calls of kernels are in destination-passing style (CallTIRRewrite).
Guarantees: no tensor is allocated by TVM.
Runs after: CallTIRRewrite. Runs before: KillAfterLastUse, which frees the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.allocation import EMPTY
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls

_ALLOC = "relax.builtin.alloc_tensor"


@dataclass(frozen=True)
class AllocateByTorch(RelaxPass):
    """Replace TVM's allocations by calls of :data:`EMPTY`, which allocates by PyTorch."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def allocate(call: relax.Call, _: relax.BlockBuilder) -> relax.Expr:
            if getattr(call.op, "name", "") != _ALLOC:
                return call
            report.rewrote()
            return relax.Call(relax.ExternFunc(EMPTY), list(call.args[:2]), ty_args=[call.ty])

        return map_calls(mod, allocate)

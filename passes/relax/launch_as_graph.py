"""Launch the kernels between those of the arguments and of the results as one CUDA graph.

Before::

    product(x, w, alloc)
    product1(alloc, w1, alloc1)
    product2(alloc1, w2, result)

After::

    product(x, w, alloc)
    R.call_packed("vm.builtin.cuda_graph.run_or_capture", cuda_graph_capture, ...)
    product2(alloc1, w2, result)

Requires: memory is planned (StaticPlanBlockMemory); the attribute ``num_input`` of a function has
the number of arguments that differ from call to call. Guarantees: the results. The buffers of the
graph stay allocated between calls, which must be on one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass

_ENABLED = {"relax.backend.use_cuda_graph": True}


@dataclass(frozen=True)
class LaunchAsGraph(RelaxPass):
    """Apply TVM's RewriteCUDAGraph."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        with tvm.transform.PassContext(config=_ENABLED):
            rewritten: tvm.IRModule = relax.transform.RewriteCUDAGraph()(mod)
        if len(rewritten.functions_items()) == len(mod.functions_items()):
            return mod
        report.rewrote()
        return rewritten

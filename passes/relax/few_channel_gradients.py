"""Gradients of images with few channels become calls of another kernel, if that is faster.

Before, with ``x`` of three channels::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.convolution_backward.default", ...}',
                            dy, x, w)

After, if that was measured to be faster::

    lv = R.call_pure_packed("tvmbridge.aten",
                            '{"op": "aten._slow_conv2d_backward.output_mask", ...}', dy, x, w)

Requires: nothing; the pass changes only float32 gradients of the data alone, and only if the other
kernel is faster. Guarantees: the same operands and results. Runs after: the split into forward and
backward. Runs before: no pass depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import ATEN_CALL, aten_call_operator, packed_call
from tvmbridge.kernels.convolution import BACKWARD
from tvmbridge.kernels.few_channels import product_spec
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls, shape_of


@dataclass(frozen=True)
class FewChannelGradients(RelaxPass):
    """Call another kernel of PyTorch for gradients of convolutions, if it is faster.

    Args:
        measure: whether kernels may be timed on this machine; if not, the pass changes nothing.
    """

    measure: bool = False

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_calls(mod, lambda call, _: self._rewritten(call, report), report)

    def _rewritten(self, call: relax.Call, report: PassReport) -> relax.Call:
        if not self.measure or aten_call_operator(call) != BACKWARD:
            return call
        _, spec, *tensors = call.args
        shapes = [shape_of(tensor) for tensor in tensors]
        known = [shape for shape in shapes if shape is not None and len(shape) == 4]
        if len(known) != 3 or any(dtype_of(tensor) != "float32" for tensor in tensors):
            return call
        faster = product_spec(spec.value, known)
        if faster is None:
            report.decline(BACKWARD, "another kernel is not known to be faster")
            return call
        report.rewrote()
        return packed_call(ATEN_CALL, faster, tensors, call.ty_args[0])

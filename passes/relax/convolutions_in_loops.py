"""3x3 convolutions and their gradients become loops of tvmbridge, if the loops are faster.

Before, with a weight of 3x3, stride 1 and padding 1::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.convolution.default", ...}', x, w, b)

After, if that was measured to be faster::

    lv = R.call_tir(convolution, (x, w, b), out_ty=R.Tensor((2, 64, 48, 48), "float32"))

Requires: nothing; other convolutions, and those that loops do not make faster, stay as they are.
Guarantees: the same operands and results. Runs after: DispatchConvolutions and the split into
forward and backward. Runs before: FuseOps.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.core.decisions import Rule, decided, sizes_vary
from tvmbridge.kernels.aten_call import aten_call_operator
from tvmbridge.kernels.convolution import BACKWARD
from tvmbridge.kernels.convolution_form import ConvolutionResult
from tvmbridge.kernels.convolution_loops import FORWARD, faster_in_loops, form_of
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls, shape_of
from tvmbridge.schedules import alone, convolutions


@dataclass(frozen=True)
class ConvolutionsInLoops(RelaxPass):
    """Replace calls of PyTorch's float32 convolutions by loops, if those are faster.

    Args:
        measure: whether kernels may be timed on this machine; if not, the pass changes nothing.
    """

    measure: bool = False

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        if not self.measure or sizes_vary():
            return mod
        return map_calls(mod, lambda call, builder: _in_loops(call, builder, report), report)


def _in_loops(call: relax.Call, builder: relax.BlockBuilder, report: PassReport) -> relax.Expr:
    operator = aten_call_operator(call)
    if operator not in (FORWARD, BACKWARD):
        return call
    _, spec, *tensors = call.args
    shapes = [shape for shape in map(shape_of, tensors) if shape is not None]
    if len(shapes) < len(tensors) or any(dtype_of(t) != "float32" for t in tensors):
        return call
    found = form_of(spec.value, shapes)
    if found is None:
        return call
    form, places = found
    if not decided(Rule.MIDDLE, lambda: faster_in_loops(form, alone.convolution)):
        report.decline(operator, "loops are not known to be faster")
        return call
    report.rewrote()
    function = convolutions.convolution(form, alone.this_machine())
    callee = builder.add_func(function, "convolution")
    type_ = relax.TensorType(form.shapes[-1], "float32")
    result = relax.call_tir(callee, [tensors[i] for i in places], type_)
    # PyTorch's backward operator returns a tuple; here it has one gradient.
    forward = form.part is ConvolutionResult.RESULT
    return result if forward else relax.Tuple([builder.emit(result)])

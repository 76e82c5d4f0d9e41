"""Weight gradients of pointwise convolutions with a stride read a slice of the data.

Before, with a weight of shape (16, 8, 1, 1) and ``x`` of shape (7, 8, 10, 10)::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.convolution_backward.default", ...}',
                            dy, x, w)  # a stride of 2

After::

    x1 = R.strided_slice(x, [2, 3], [0, 0], [10, 10], [2, 2])
    lv = R.call_pure_packed("tvmbridge.aten", ..., dy, x1, w)  # a stride of 1

The convolution reads no other pixels. PyTorch's kernel crashes for some of these gradients
(:func:`~tvmbridge.kernels.convolution.reads_slice`).

Requires: nothing. Guarantees: the same results. Runs after: the split into forward and backward,
ChannelsLast. Runs before: CompileAtenCalls.
"""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import ATEN_CALL, aten_call_operator, packed_call
from tvmbridge.kernels.convolution import reads_slice
from tvmbridge.kernels.few_channels import BACKWARD
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls, shape_of


class SlicedGradients(RelaxPass):
    """Slice the data of weight gradients that PyTorch's kernel does not compute safely."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Call:
            if aten_call_operator(call) != BACKWARD:
                return call
            _, spec, cotangent, data, weight = call.args
            content, extents, shape = json.loads(spec.value), shape_of(data), shape_of(weight)
            axes = None if shape is None else _sliced_axes(content["args"], shape)
            if not axes or extents is None:
                return call
            report.rewrote()
            stride, ends = content["args"][_STRIDE], [extents[axis] for axis in axes]
            begins = [0] * len(axes)
            sliced = builder.emit(relax.op.strided_slice(data, axes, begins, ends, stride))
            content["args"][_STRIDE] = content["args"][_DILATION] = [1] * len(axes)
            tensors = [cotangent, sliced, weight]
            return packed_call(ATEN_CALL, json.dumps(content), tensors, call.ty_args[0])

        return map_calls(mod, rewrite, report)


# Positions among the arguments of the ATen call.
_STRIDE, _DILATION = 4, 6
_IN_ORDER = {kind: [{kind: i} for i in range(3)] for kind in ("tensor", "channels_last")}


def _sliced_axes(args: list[Any], weight: tuple[int, ...]) -> list[int]:
    """Return the axes of the data that have a stride; none if the call stays."""
    *operands, _, stride, padding, _, transposed, _, _, mask = args
    last = operands == _IN_ORDER["channels_last"]
    if not last and operands != _IN_ORDER["tensor"]:
        return []
    if transposed or any(padding) or mask != [False, True, False]:
        return []
    shape = (weight[0], weight[-1], *weight[1:-1]) if last else weight
    first = 1 if last else 2
    return list(range(first, first + len(stride))) if reads_slice(shape, stride) else []

"""Weight gradients of pointwise convolutions with a stride read a slice of the data.

Before, with a weight of shape (16, 8, 1, 1) and ``x`` of shape (7, 8, 10, 10)::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.convolution_backward.default", ...}',
                            dy, x, w)  # a stride of 2

After::

    x1 = R.strided_slice(x, [2, 3], [0, 0], [10, 10], [2, 2])
    lv = R.call_pure_packed("tvmbridge.aten", ..., dy, x1, w)  # a stride of 1

The convolution reads no other pixels. If it is transposed, the cotangent is sliced in place of the
data. PyTorch's kernel crashes for some of these gradients
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
from tvmbridge.kernels.convolution import BACKWARD, reads_slice
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls, shape_of


class SlicedGradients(RelaxPass):
    """Slice what weight gradients read, if PyTorch's kernel does not compute them safely."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Call:
            if aten_call_operator(call) != BACKWARD:
                return call
            _, spec, *tensors = call.args
            content = json.loads(spec.value)
            args, known = content["args"], map(shape_of, tensors)
            shapes = [shape for shape in known if shape is not None]
            if len(shapes) < 3 or not (axes := _sliced_axes(args, shapes[_WEIGHT])):
                return call
            report.rewrote()
            place = 0 if args[_TRANSPOSED] else 1
            ends, begins = [shapes[place][axis] for axis in axes], [0] * len(axes)
            tensors[place] = builder.emit(
                relax.op.strided_slice(tensors[place], axes, begins, ends, args[_STRIDE])
            )
            args[_STRIDE] = args[_DILATION] = [1] * len(axes)
            args[_OUTPUT_PADDING] = begins
            return packed_call(ATEN_CALL, json.dumps(content), tensors, call.ty_args[0])

        return map_calls(mod, rewrite, report)


# Positions among the arguments of the ATen call.
_WEIGHT, _STRIDE, _DILATION, _TRANSPOSED, _OUTPUT_PADDING = 2, 4, 6, 7, 8
_IN_ORDER = {kind: [{kind: i} for i in range(3)] for kind in ("tensor", "channels_last")}


def _sliced_axes(args: list[Any], weight: tuple[int, ...]) -> list[int]:
    """Return the axes of an image that have a stride; none if the call stays."""
    *operands, _, stride, padding, _, _, _, _, mask = args
    last = operands == _IN_ORDER["channels_last"]
    if not last and operands != _IN_ORDER["tensor"]:
        return []
    if any(padding) or mask != [False, True, False]:
        return []
    shape = (weight[0], weight[-1], *weight[1:-1]) if last else weight
    first = 1 if last else 2
    return list(range(first, first + len(stride))) if reads_slice(shape, stride) else []

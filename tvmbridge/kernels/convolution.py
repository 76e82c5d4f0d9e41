"""Convolutions: Relax's operators for them, and PyTorch's kernels for them and their gradients.

In the graph a convolution is ``relax.nn.conv{1,2,3}d`` or ``relax.nn.conv{1,2,3}d_transpose``. Its
gradients are separate ATen calls of ``aten.convolution_backward``, each with one result, so that an
unused gradient is removed as dead code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import ATEN_CALL, call_overload, packed_call

_OPERATORS = {
    (1, False): relax.op.nn.conv1d,
    (2, False): relax.op.nn.conv2d,
    (3, False): relax.op.nn.conv3d,
    (1, True): relax.op.nn.conv1d_transpose,
    (2, True): relax.op.nn.conv2d_transpose,
    (3, True): relax.op.nn.conv3d_transpose,
}

BACKWARD = "aten.convolution_backward.default"
"""The overload that computes the gradients of a convolution in eager PyTorch."""

CONVOLUTIONS: dict[str, bool] = {
    f"relax.nn.conv{rank}d{'_transpose' if transposed else ''}": transposed
    for rank, transposed in _OPERATORS
}
"""Relax's convolutions by name, and whether each is transposed."""


# oneDNN has a kernel for weight gradients of pointwise convolutions with a stride. It slices data
# with channels last in blocks of so many channels. With fewer channels it writes beyond its memory,
# and the process crashes, in eager PyTorch too. A transposed convolution's cotangent is such data.
_BLOCK = 16
# The layouts of data, weight and result of a convolution with channels last, by whether the weight
# has its channels last too.
_CHANNELS_LAST = {False: ("NHWC", "OIHW", "NHWC"), True: ("NHWC", "OHWI", "NHWC")}


@dataclass(frozen=True)
class Convolution:
    """The parameters of a convolution, named as in ``aten.convolution``.

    Tuples have one number for each spatial dimension. The data has the shape (batch, channels,
    *extents). The weight has the result's channels first; if transposed, the data's channels first.

    - ``padding``: the padding at each end of a dimension.
    - ``channels_last``: whether data and result of two dimensions have the shape (batch, height,
      width, channels) instead.
    - ``weight_last``: whether the weight of such a convolution has the data's channels last, too.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    channels_last: bool = False
    weight_last: bool = False

    @classmethod
    def of(cls, call: relax.Call) -> Convolution | None:
        """Return the parameters of ``call``, one of :data:`CONVOLUTIONS`.

        None if PyTorch has no such convolution: the dimensions are in an order that it has not,
        the padding differs between two ends, or the result has another dtype than the data.
        """
        attrs = call.attrs
        rank = call.args[0].ty.ndim - 2
        transposed = CONVOLUTIONS[call.op.name]
        edges = [int(p) for p in attrs.padding]
        plain = ("NCDHW"[:2] + "DHW"[-rank:], ("IO" if transposed else "OI") + "DHW"[-rank:])
        if rank == 1:
            plain = ("NCW", "IOW" if transposed else "OIW")
        layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
        dtype = str(call.args[0].ty.dtype)
        out_dtype = "" if attrs.out_dtype is None else str(attrs.out_dtype)
        channels_last = not transposed and layouts in _CHANNELS_LAST.values()
        if not channels_last and layouts != (*plain, plain[0]):
            return None
        if edges[:rank] != edges[rank:]:
            return None
        if out_dtype not in ("", "void", dtype) or str(call.args[1].ty.dtype) != dtype:
            return None
        output_padding = [int(p) for p in attrs.output_padding] if transposed else [0] * rank
        return cls(
            stride=tuple(int(s) for s in attrs.strides),
            padding=tuple(edges[:rank]),
            dilation=tuple(int(d) for d in attrs.dilation),
            transposed=transposed,
            output_padding=tuple(output_padding),
            groups=int(attrs.groups),
            channels_last=channels_last,
            weight_last=layouts == _CHANNELS_LAST[True],
        )

    def of_operands(self, data: relax.Expr, weight: relax.Expr) -> relax.Call:
        """Return the call of Relax's convolution operator on ``data`` and ``weight``."""
        options: dict[str, Any] = {
            "strides": self.stride,
            "padding": self.padding * 2,
            "dilation": self.dilation,
            "groups": self.groups,
        }
        if self.transposed:
            options["output_padding"] = self.output_padding
        if self.channels_last:
            layouts = _CHANNELS_LAST[self.weight_last]
            options |= zip(("data_layout", "kernel_layout", "out_layout"), layouts, strict=True)
        return _OPERATORS[len(self.stride), self.transposed](data, weight, **options)

    def _arguments(self) -> list[Any]:
        """Return the arguments of ``aten.convolution`` that follow the bias."""
        return [
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            self.transposed,
            list(self.output_padding),
            self.groups,
        ]

    def kernel_call(self, tensors: Sequence[relax.Expr], type_: relax.Type) -> relax.Call:
        """Return the call of PyTorch's kernel; ``tensors`` are data, weight and perhaps a bias."""
        operands: list[Any] = [{"tensor": i} for i in range(len(tensors))]
        operands += [None] * (3 - len(operands))
        if self.channels_last:
            operands[0] = {"channels_last": 0}
        if self.weight_last:
            operands[1] = {"channels_last": 1}
        arguments = [*operands, *self._arguments()]
        name = "aten.convolution.default"
        return call_overload(name, arguments, tensors, type_, channels_last=self.channels_last)

    def gradient_call(
        self, cotangent: relax.Expr, data: relax.Expr, weight: relax.Expr, position: int
    ) -> relax.Call:
        """Return the call for the gradient of data (``position`` 0) or weight (1): a tuple."""
        mask = [position == number for number in range(3)]
        operands: list[Any] = [{"tensor": i} for i in range(3)]
        content = {
            "op": BACKWARD,
            "args": [*operands, None, *self._arguments(), mask],
            "kwargs": {},
            "results": [position],
        }
        wanted = (data, weight)[position]
        tensors = [cotangent, data, weight]
        return packed_call(ATEN_CALL, json.dumps(content), tensors, relax.TupleType([wanted.ty]))


def reads_slice(weight: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the gradient of a convolution's weight reads a slice, made before.

    It is a slice of the data, or of the cotangent if the convolution is transposed.

    Args:
        weight: the shape, with channels second.
    """
    return set(weight[2:]) == {1} and max(stride) > 1 and weight[1] < _BLOCK


def is_convolution(expr: relax.Expr | None) -> bool:
    """Whether ``expr`` is a call of one of :data:`CONVOLUTIONS`."""
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, tvm.ir.Op):
        return False
    return expr.op.name in CONVOLUTIONS

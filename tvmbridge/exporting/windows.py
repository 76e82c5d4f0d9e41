"""Loops for pooling windows, ``unfold`` and strided views, for code without PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.aten.windows import each
from tvmbridge.legalize.broadcast import INJECTIVE, REDUCTION
from tvmbridge.legalize.lets import constant
from tvmbridge.passes.base import dtype_of, shape_of

_FLOATS = ("float32", "float64")
# In one dimension, from the position of a result: the begin and end of its window in the data, and
# the window's length with padding.
_Window = Callable[[Expr], tuple[Expr, Expr, Expr]]


def average_pool(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return ``avg_pool`` of any number of dimensions; all its arguments are supported."""
    data = arguments["self"]
    shape = shape_of(data)
    if shape is None or dtype_of(data) not in _FLOATS:
        return None
    count = int(arguments.op.split("avg_pool")[1][0])
    size = each(arguments["kernel_size"], count)
    step = each(arguments["stride"] or size, count)
    edge = each(arguments["padding"], count)
    windows = [
        _window(*each) for each in zip(size, step, edge, shape[len(shape) - count :], strict=True)
    ]
    divisor = arguments["divisor_override"] if count > 1 else None
    padded = bool(arguments["count_include_pad"])
    return _means(bb, call, data, windows, size, (divisor, padded))


def adaptive_average_pool(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return ``_adaptive_avg_pool``, whose windows may overlap and differ in size."""
    data = arguments["self"]
    shape, result = shape_of(data), shape_of(call)
    if shape is None or result is None or dtype_of(data) not in _FLOATS:
        return None
    count = int(arguments.op.split("avg_pool")[1][0])
    pairs = list(zip(shape[len(shape) - count :], result[len(result) - count :], strict=True))
    windows, size = adaptive_windows(pairs)
    return _means(bb, call, data, windows, size, (None, False))


def adaptive_windows(pairs: Sequence[tuple[int, int]]) -> tuple[list[_Window], list[int]]:
    """Return the windows of adaptive pooling, and their largest sizes.

    ``pairs`` has the extents of data and result in each dimension.
    """
    windows = [_adaptive(extent, places) for extent, places in pairs]
    size = [max(-(-(i + 1) * n // o) - i * n // o for i in range(o)) if o else 1 for n, o in pairs]
    return windows, size


def _number(value: int) -> Expr:
    return constant(value, "int64")


def _window(size: int, step: int, edge: int, extent: int) -> _Window:
    def window(place: Expr) -> tuple[Expr, Expr, Expr]:
        first = place * _number(step) - _number(edge)
        last = tirx.min(first + _number(size), _number(extent + edge))
        inside = tirx.min(last, _number(extent))
        return tirx.max(first, _number(0)), inside, last - first

    return window


def _adaptive(extent: int, places: int) -> _Window:
    def window(place: Expr) -> tuple[Expr, Expr, Expr]:
        first = tirx.floordiv(place * _number(extent), _number(places))
        end = (place + _number(1)) * _number(extent) + _number(places - 1)
        last = tirx.floordiv(end, _number(places))
        return first, last, last - first

    return window


def _means(
    bb: relax.BlockBuilder,
    call: Call,
    data: Expr,
    windows: Sequence[_Window],
    size: Sequence[int],
    divided: tuple[int | None, bool],
) -> Expr:
    """Return the means of windows of at most ``size`` elements.

    ``divided`` is the divisor, or None to divide by the window's length, and whether this length
    includes the padding.
    """
    result, dtype = list(shape_of(call) or ()), dtype_of(data)
    front = len(result) - len(size)
    divisor, padded = divided

    def compute(x: te.Tensor) -> te.Tensor:
        axes = [te.reduce_axis((0, n), name=f"w{d}") for d, n in enumerate(size)]

        def total(*at: Expr) -> Expr:
            inside: Expr = tirx.const(True, "bool")
            places = []
            for window, place, axis in zip(windows, at[front:], axes, strict=True):
                first, last, _ = window(place)
                places.append(first + axis)
                inside = tirx.And(inside, first + axis < last)
            read = tirx.if_then_else(inside, x(*at[:front], *places), constant(0.0, dtype))
            return te.sum(read, axis=axes)

        def mean(*at: Expr) -> Expr:
            if divisor is not None:
                return sums(*at) / constant(float(divisor), dtype)
            found = [window(p) for window, p in zip(windows, at[front:], strict=True)]
            counts = [whole if padded else last - first for first, last, whole in found]
            number = counts[0]
            for count in counts[1:]:
                number = number * count
            return sums(*at) / tirx.Cast(dtype, number)

        sums = te.compute(result, total, name="T_window")
        return te.compute(result, mean, name="T_mean")

    attrs = {"op_pattern": REDUCTION}
    return bb.call_te(compute, data, primfunc_name_hint="avg_pool", primfunc_attrs=attrs)


def unfold(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return ``x.unfold(dimension, size, step)``."""
    data = arguments["self"]
    shape, result = shape_of(data), shape_of(call)
    if not shape or result is None:
        return None
    dimension, step = int(arguments["dimension"]) % len(shape), int(arguments["step"])

    def compute(x: te.Tensor) -> te.Tensor:
        def element(*at: Expr) -> Expr:
            places = list(at[:-1])
            places[dimension] = places[dimension] * _number(step) + at[-1]
            return x(*places)

        return te.compute(list(result), element, name="T_unfold")

    return _moved(bb, compute, data, "unfold")


def as_strided(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return ``x.as_strided(size, stride, offset)`` of a tensor that is contiguous in the graph."""
    data = arguments["self"]
    shape, result = shape_of(data), shape_of(call)
    if shape is None or result is None:
        return None
    strides = [int(s) for s in arguments["stride"]]
    offset = int(arguments["storage_offset"] or 0)
    last = offset + sum((n - 1) * s for n, s in zip(result, strides, strict=True))
    if prod(result) and not 0 <= last < prod(shape):
        return None
    contiguous = [prod(shape[d + 1 :]) for d in range(len(shape))]

    def compute(x: te.Tensor) -> te.Tensor:
        def element(*at: Expr) -> Expr:
            return x(*position(flat_place(at, strides, offset), shape, contiguous))

        return te.compute(list(result), element, name="T_as_strided")

    return _moved(bb, compute, data, "as_strided")


def _moved(
    bb: relax.BlockBuilder, compute: Callable[..., te.Tensor], data: Expr, name: str
) -> Expr:
    attrs = {"op_pattern": INJECTIVE}
    return bb.call_te(compute, data, primfunc_name_hint=name, primfunc_attrs=attrs)


def flat_place(indices: Sequence[Expr], strides: Sequence[int], offset: int) -> Expr:
    """Return the memory offset of the element with these ``indices`` in a strided view."""
    place = _number(offset)
    for index, stride in zip(indices, strides, strict=True):
        place = place + index * _number(stride)
    return place


def position(place: Expr, shape: Sequence[int], strides: Sequence[int]) -> list[Expr]:
    """Return the indices of the element at memory offset ``place`` of a dense tensor."""
    found: list[Expr] = [_number(0)] * len(shape)
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    for d in order:
        stride = _number(strides[d])
        found[d] = tirx.floordiv(place, stride)
        place = tirx.floormod(place, stride)
    return found

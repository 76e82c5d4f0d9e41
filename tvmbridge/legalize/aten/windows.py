"""Loops for pooling: means and maxima over sliding windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.largest import Taps, largest, places_of_largest
from tvmbridge.legalize.broadcast import REDUCTION, shape_of
from tvmbridge.legalize.lets import constant
from tvmbridge.legalize.reductions import Reducer, reducer_for, static_shape

MAX_POOL = "aten.max_pool2d_with_indices.default"


@dataclass(frozen=True)
class _Windows:
    """The windows of a pooling operator, with one number for each of the last dimensions.

    - ``size``: the number of positions of a window.
    - ``step``: the distance from one window to the next.
    - ``edge``: the padding at each edge.
    - ``spread``: the distance between positions of a window, the dilation.
    """

    size: Sequence[int]
    step: Sequence[int]
    edge: Sequence[int]
    spread: Sequence[int]

    @classmethod
    def of(cls, arguments: Arguments, count: int) -> _Windows:
        size = each(arguments["kernel_size"], count)
        spread = arguments.values.get("dilation", 1)
        step = arguments["stride"] or size
        rest = (each(v, count) for v in (step, arguments["padding"], spread))
        return cls(size, *rest)

    @property
    def are_by_rows(self) -> bool:
        """Whether maxima are computed over a window's rows first and then over its columns.

        Not for variable sizes, because windows may reach over the edge at some of the sizes.
        """
        return all(n == 1 for n in self.spread) and not sizes_vary()


def each(value: Any, count: int) -> list[int]:
    """Return one number for each of ``count`` dimensions; a single number holds for all."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * count if len(listed) == 1 else listed


def _padded(x: te.Tensor, windows: _Windows, value: Expr) -> te.Tensor:
    """Return ``x`` with its last dimensions padded by ``value``."""
    if not any(windows.edge):
        return x
    shape = static_shape(x)
    front = len(shape) - len(windows.edge)
    edges = [0] * front + list(windows.edge)

    def element(*i: Expr) -> Expr:
        inside = tirx.const(True, "bool")
        for index, edge, extent in zip(i, edges, shape, strict=True):
            if edge:
                inside = tirx.And(inside, tirx.And(index >= edge, index < extent + edge))
        at = [index - edge if edge else index for index, edge in zip(i, edges, strict=True)]
        return tirx.if_then_else(inside, x(*at), value)

    return te.compute([n + 2 * e for n, e in zip(shape, edges, strict=True)], element, name="pad")


def _reduced(x: te.Tensor, shape: Sequence[int], windows: _Windows, reducer: Reducer) -> te.Tensor:
    front = len(shape) - len(windows.size)
    axes = [te.reduce_axis((0, n), name=f"w{d}") for d, n in enumerate(windows.size)]

    def element(*i: Expr) -> Expr:
        places = [
            index * step + axis * spread
            for index, step, axis, spread in zip(
                i[front:], windows.step, axes, windows.spread, strict=True
            )
        ]
        return reducer(x(*i[:front], *places), axis=axes)

    return te.compute(list(shape), element, name="T_window")


def _mean(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    shape, dtype = shape_of(call), str(call.ty.dtype.dtype)
    count = int(arguments.op.split("avg_pool")[1][0])
    windows = _Windows.of(arguments, count)

    def compute(x: te.Tensor) -> te.Tensor:
        padded = _padded(x, windows, constant(0.0, dtype))
        total = _reduced(padded, shape, windows, reducer_for("sum", dtype))
        size = constant(float(math.prod(windows.size)), dtype)
        return te.compute(shape, lambda *i: opaque(total(*i) / size), name="T_mean")

    return _emit(bb, compute, arguments, "avg_pool")


def _largest(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit the one result of max pooling that the call returns: the maxima, or their indices."""
    result = call.ty.fields[0]
    shape, dtype = list(map(int, result.shape.values)), str(result.dtype.dtype)
    windows = _Windows.of(arguments, 2)
    places = arguments.results == (1,)

    def compute(x: te.Tensor) -> te.Tensor:
        if not windows.are_by_rows:
            padded = _padded(x, windows, -tirx.infinity(dtype))
            return _reduced(padded, shape, windows, reducer_for("max", dtype))
        rows, columns = _taps(x, shape, windows)
        return (places_of_largest if places else largest)(x, rows, columns)

    name = "places_of_max_pool" if places else "max_pool"
    return relax.Tuple([bb.emit(_emit(bb, compute, arguments, name))])


def _taps(x: te.Tensor, shape: Sequence[int], windows: _Windows) -> list[Taps]:
    sizes = zip(windows.size, windows.step, windows.edge, strict=True)
    extents = zip(static_shape(x)[-2:], shape[-2:], strict=True)
    return [Taps(*given, *own) for given, own in zip(sizes, extents, strict=True)]


def finds_places(content: dict[str, Any]) -> bool:
    """Whether loops can compute the indices of a max pooling; ``content`` is its spec's content."""
    if content["op"] != MAX_POOL or not content.get("compiled"):
        return False
    return _Windows.of(Arguments.of(content, [None]), 2).are_by_rows


def _emit(
    bb: relax.BlockBuilder,
    compute: Callable[[te.Tensor], te.Tensor],
    arguments: Arguments,
    name: str,
) -> Expr:
    attrs = {"op_pattern": REDUCTION}
    x = arguments["self"]
    return bb.call_te(compute, x, primfunc_name_hint=name, primfunc_attrs=attrs)


WINDOWS: dict[str, Compile] = {
    **{f"aten.avg_pool{n}d.default": _mean for n in (1, 2, 3)},
    MAX_POOL: _largest,
}

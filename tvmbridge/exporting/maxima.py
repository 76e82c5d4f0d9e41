"""Loops for max pooling in all its forms, with the places of the maxima."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.exporting.windows import adaptive_windows
from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.aten.windows import each
from tvmbridge.legalize.broadcast import REDUCTION
from tvmbridge.legalize.functions import is_nan
from tvmbridge.legalize.lets import constant
from tvmbridge.legalize.reductions import reducer_for
from tvmbridge.passes.base import dtype_of, shape_of

_FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class _Span:
    """The windows along one dimension.

    - ``size``: the most positions of a window.
    - ``extent``: the extent of the data.
    - ``at``: the position in the data, from the place of a result and a number below ``size``.
      Numbers beyond a window give one of its positions again.
    """

    size: int
    extent: int
    at: Callable[[Expr, Expr], Expr]


def max_pool(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return maxima over windows, and their places, for the results that the call returns."""
    data = arguments["self"]
    shape, result = shape_of(data), [int(n) for n in call.ty.fields[0].shape.values]
    if shape is None or dtype_of(data) not in _FLOATS or not prod(shape):
        return None
    adaptive = "adaptive" in arguments.op
    count = int(arguments.op.split("max_pool")[1][0])
    pairs = list(zip(shape[-count:], result[-count:], strict=True))
    spans = _adaptive(pairs) if adaptive else _sliding(arguments, pairs)
    if spans is None:
        return None
    found = []
    for number in arguments.results or (0, 1):

        def compute(x: te.Tensor, number: int = number) -> te.Tensor:
            largest = _largest(x, result, spans)
            return largest if number == 0 else _places(x, largest, result, spans)

        name = "places_of_max_pool" if number else "max_pool"
        attrs = {"op_pattern": REDUCTION}
        call_te = bb.call_te(compute, data, primfunc_name_hint=name, primfunc_attrs=attrs)
        found.append(bb.emit(call_te))
    return relax.Tuple(found)


def _sliding(arguments: Arguments, pairs: Sequence[tuple[int, int]]) -> list[_Span] | None:
    """Return the windows of a pooling; None if one of them has no position in the data."""
    count = len(pairs)
    size = each(arguments["kernel_size"], count)
    settings = (arguments["stride"] or size, arguments["padding"], arguments["dilation"])
    rest = [each(value, count) for value in settings]

    def span(size: int, step: int, edge: int, spread: int, extent: int) -> _Span:
        def at(place: Expr, tap: Expr) -> Expr:
            start = place * _number(step) - _number(edge)
            first = (tirx.max(_number(0) - start, _number(0)) + _number(spread - 1)) // spread
            last = (_number(extent - 1) - start) // spread
            return start + tirx.min(tirx.max(tap, first), last) * _number(spread)

        return _Span(size, extent, at)

    step, edge, spread = rest
    given = list(zip(size, step, edge, spread, strict=True))
    for (n, apart, edges, by), (extent, places) in zip(given, pairs, strict=True):
        starts = [place * apart - edges for place in range(places)]
        if not all(any(0 <= s + t * by < extent for t in range(n)) for s in starts):
            return None
    return [
        span(n, s, e, d, extent) for (n, s, e, d), (extent, _) in zip(given, pairs, strict=True)
    ]


def _adaptive(pairs: Sequence[tuple[int, int]]) -> list[_Span]:
    def span(extent: int, size: int, window: Callable[[Expr], tuple[Expr, Expr, Expr]]) -> _Span:
        def at(place: Expr, tap: Expr) -> Expr:
            first, last, _ = window(place)
            return tirx.min(first + tap, last - _number(1))

        return _Span(size, extent, at)

    windows, sizes = adaptive_windows(pairs)
    return [span(n, s, w) for (n, _), s, w in zip(pairs, sizes, windows, strict=True)]


def _number(value: int) -> Expr:
    return constant(value, "int64")


def _taps(spans: Sequence[_Span], at: Sequence[Expr]) -> tuple[list[te.IterVar], list[Expr]]:
    """Return reduction axes over a window, and the position in the data."""
    axes = [te.reduce_axis((0, span.size), name=f"w{d}") for d, span in enumerate(spans)]
    return axes, [s.at(place, axis.var) for s, place, axis in zip(spans, at, axes, strict=True)]


def _largest(x: te.Tensor, shape: Sequence[int], spans: Sequence[_Span]) -> te.Tensor:
    dtype, front = str(x.dtype), len(shape) - len(spans)

    def element(*i: Expr) -> Expr:
        axes, positions = _taps(spans, i[front:])
        value = x(*i[:front], *positions)
        return reducer_for("max", dtype)(value, axis=axes)

    return te.compute(list(shape), element, name="T_largest")


def _places(
    x: te.Tensor, largest: te.Tensor, shape: Sequence[int], spans: Sequence[_Span]
) -> te.Tensor:
    """Return the flat place of the first maximum of each window, or of its last NaN."""
    front = len(shape) - len(spans)
    count = prod(span.extent for span in spans)

    def place(kind: str, is_place: Callable[[Expr, Expr], Expr], nothing: int) -> te.Tensor:
        def element(*i: Expr) -> Expr:
            axes, positions = _taps(spans, i[front:])
            flat = _number(0)
            for span, position in zip(spans, positions, strict=True):
                flat = flat * _number(span.extent) + position
            value = x(*i[:front], *positions)
            chosen = tirx.Select(is_place(value, largest(*i)), flat, _number(nothing))
            return reducer_for(kind, "int64")(chosen, axis=axes)

        return te.compute(list(shape), element, name=f"T_{kind}")

    first = place("min", lambda value, most: value.equal(most), count - 1)
    last = place("max", lambda value, _: is_nan(value), 0)
    return te.compute(
        list(shape),
        lambda *i: tirx.Select(is_nan(largest(*i)), last(*i), first(*i)),
        name="T_places",
    )

"""Loops for ATen operators that move elements: indexing, gather, diagonal and slice_scatter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.bounds import checked
from tvmbridge.legalize.broadcast import INJECTIVE, element_of, shape_of
from tvmbridge.legalize.lets import constant


def _moved(
    bb: relax.BlockBuilder,
    call: Call,
    name: str,
    tensors: Sequence[Expr],
    element: Callable[[Sequence[te.Tensor], tuple[Expr, ...]], Expr],
) -> Expr:
    """Emit loops over the result, whose element at ``indices`` is ``element(tensors, indices)``."""
    shape = shape_of(call)

    def compute(*args: te.Tensor) -> te.Tensor:
        return te.compute(shape, lambda *i: element(args, i), name=f"T_{name}")

    attrs = {"op_pattern": INJECTIVE}
    return bb.call_te(compute, *tensors, primfunc_name_hint=name, primfunc_attrs=attrs)


def _wide(index: Expr) -> Expr:
    return tirx.Cast("int64", index)


def _index(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit advanced indexing.

    The dimensions of the broadcast indices replace the indexed dimensions. Their place is that of
    the first indexed dimension, or the front if indexed dimensions are not adjacent.
    """
    x, listed = arguments["self"], arguments["indices"]
    shape = shape_of(x)
    axes = [axis for axis, index in enumerate(listed) if index is not None]
    indices = [checked(bb, listed[a], shape[a], "IndexError", negative=True) for a in axes]
    rank = len(shape_of(call)) - (len(shape) - len(axes))
    start = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0

    def element(tensors: Sequence[te.Tensor], i: tuple[Expr, ...]) -> Expr:
        inner = i[start : start + rank]
        rest = iter([*i[:start], *i[start + rank :]])
        found = {
            axis: _wide(element_of(t, inner)) for axis, t in zip(axes, tensors[1:], strict=True)
        }
        return tensors[0](*[found[a] if a in found else next(rest) for a in range(len(shape))])

    return _moved(bb, call, "index", [x, *indices], element)


def _along(
    bb: relax.BlockBuilder, call: Call, arguments: Arguments, *, error: str, aligned: bool
) -> Expr:
    """Emit a look-up along one dimension: by a vector, or by a tensor if ``aligned``."""
    x, shape = arguments["self"], shape_of(arguments["self"])
    dim = arguments["dim"] % len(shape)
    index = checked(bb, arguments["index"], shape[dim], error, negative=False)

    def element(tensors: Sequence[te.Tensor], i: tuple[Expr, ...]) -> Expr:
        place = _wide(tensors[1](*i) if aligned else tensors[1](i[dim]))
        return tensors[0](*[place if a == dim else n for a, n in enumerate(i)])

    return _moved(bb, call, "gather" if aligned else "index_select", [x, index], element)


def _diagonal(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    x, offset = arguments["self"], arguments["offset"]
    rank = len(shape_of(x))
    first, second = (arguments[name] % rank for name in ("dim1", "dim2"))

    def element(tensors: Sequence[te.Tensor], i: tuple[Expr, ...]) -> Expr:
        rest = iter(i[:-1])
        places = {first: i[-1] + max(0, -offset), second: i[-1] + max(0, offset)}
        return tensors[0](*[places[a] if a in places else next(rest) for a in range(rank)])

    return _moved(bb, call, "diagonal", [x], element)


def _slice_scatter(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit the input with ``src`` in place of a slice."""
    shape = shape_of(call)
    dim = arguments["dim"] % len(shape)
    limits = slice(arguments["start"], arguments["end"], arguments["step"])
    first, last, step = limits.indices(shape[dim])
    count = len(range(first, last, step))

    def element(tensors: Sequence[te.Tensor], i: tuple[Expr, ...]) -> Expr:
        place = i[dim] - constant(first, "int64")
        inside = tirx.And(place >= 0, place < count * step)
        if step > 1:
            inside = tirx.And(inside, tirx.floormod(place, step).equal(constant(0, "int64")))
        # For one row, an index of its own keeps divisions of sums with a size out of the code.
        taken = tirx.floordiv(place, step) if count > 1 else constant(0, "int64")
        row = [taken if a == dim else n for a, n in enumerate(i)]
        return tirx.if_then_else(inside, tensors[1](*row), tensors[0](*i))

    return _moved(bb, call, "slice_scatter", [arguments["self"], arguments["src"]], element)


def _roll(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit the input with its elements moved along dimensions, around their ends.

    Without dimensions, the elements move in the order of memory.
    """
    x, shifts, dims = arguments["self"], arguments["shifts"], arguments["dims"]
    shape = shape_of(x)
    if not dims:
        flat = bb.emit(relax.op.reshape(x, [prod(shape)]))
        return relax.op.reshape(_rolled(bb, flat, {0: shifts[0]}), shape)
    moved: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % len(shape)
        moved[axis] = moved.get(axis, 0) + shift
    return _rolled(bb, x, moved)


def _rolled(bb: relax.BlockBuilder, x: Expr, moved: Mapping[int, int]) -> Expr:
    """Emit ``x`` with its elements moved by ``moved`` along each axis."""
    shape = shape_of(x)

    def element(tensors: Sequence[te.Tensor], i: tuple[Expr, ...]) -> Expr:
        places = list(i)
        for axis, shift in moved.items():
            first = -shift % shape[axis]
            if first:
                places[axis] = tirx.floormod(i[axis] + constant(first, "int64"), shape[axis])
        return tensors[0](*places)

    return bb.emit(_moved(bb, x, "roll", [x], element))


MOVES: dict[str, Compile] = {
    "aten.index.Tensor": _index,
    "aten.gather.default": partial(_along, error="RuntimeError", aligned=True),
    "aten.index_select.default": partial(_along, error="IndexError", aligned=False),
    "aten.diagonal.default": _diagonal,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.roll.default": _roll,
}

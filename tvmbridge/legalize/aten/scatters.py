"""Loops for scatter and index_put: writes into a copy of a tensor, in PyTorch's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.aten.bounds import checked
from tvmbridge.legalize.aten.nests import Buffer, dtype_of, emit_nest, loops, store
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.elementwise import larger, smaller
from tvmbridge.legalize.functions import HALF
from tvmbridge.legalize.lets import constant
from tvmbridge.legalize.reductions import accumulator_dtype

Combine = Callable[[Expr, Expr], Expr]


def _replace(old: Expr, new: Expr) -> Expr:
    return new


def added(old: Expr, new: Expr) -> Expr:
    """Return the sum of two elements of one dtype, rounded to that dtype."""
    dtype = str(old.ty.dtype)
    if dtype == "bool":
        return tirx.Or(old, new)
    if dtype in HALF:
        return tirx.Cast(dtype, tirx.Cast("float32", old) + tirx.Cast("float32", new))
    return old + new


def _copy(source: Buffer, target: Buffer, shape: Sequence[int]) -> None:
    with loops(*shape) as i:
        store(target, source[tuple(i)], *i)


def _scatter(combine: Combine) -> Compile:
    """Return a function that emits loops over all indices, in order.

    The last of several writes to one element stays, unless ``combine`` adds. Half precisions are
    added up in float32 and rounded once, as in PyTorch's kernel.
    """

    def compile_call(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
        x, shape, result = arguments["self"], shape_of(call), dtype_of(call)
        dtype = accumulator_dtype(result) if combine is added else result
        if dtype != result:
            x = bb.emit(relax.op.astype(x, dtype))
        dim = arguments["dim"] % len(shape)
        places = checked(bb, arguments["index"], shape[dim], "RuntimeError", negative=False)
        source = arguments.values.get("src")
        number = None if source is not None else constant(arguments["value"], dtype)

        def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
            target = outputs[0]
            _copy(inputs[0], target, shape)
            with loops(*shape_of(places)) as i:
                place = tirx.Cast("int64", inputs[1][tuple(i)])
                at = [place if axis == dim else n for axis, n in enumerate(i)]
                value = inputs[2][tuple(i)] if number is None else number
                if dtype != result:
                    value = tirx.Cast(dtype, value)
                store(target, combine(target[tuple(at)], value), *at)

        tensors = [x, places] if source is None else [x, places, source]
        written = emit_nest(bb, "scatter", tensors, [(shape, dtype)], write)
        return written if dtype == result else relax.op.astype(written, result)

    return compile_call


def _index_put(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit writes, or additions, to the elements that advanced indexing would read."""
    x, listed, values = arguments["self"], arguments["indices"], arguments["values"]
    shape, dtype = shape_of(x), dtype_of(x)
    axes = [axis for axis, index in enumerate(listed) if index is not None]
    indices = [checked(bb, listed[a], shape[a], "IndexError", negative=True) for a in axes]
    common = _broadcast([shape_of(i) for i in indices])
    start = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    kept = [n for a, n in enumerate(shape) if a not in axes]
    extents = [*kept[:start], *common, *kept[start:]]
    combine = added if arguments["accumulate"] else _replace

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        target = outputs[0]
        _copy(inputs[0], target, shape)
        with loops(*extents) as i:
            inner = tuple(i[start : start + len(common)])
            rest = iter([*i[:start], *i[start + len(common) :]])
            found = {
                axis: tirx.Cast("int64", _element(places, inner))
                for axis, places in zip(axes, inputs[2:], strict=True)
            }
            at = [found[a] if a in found else next(rest) for a in range(len(shape))]
            value = _element(inputs[1], tuple(i))
            store(target, combine(target[tuple(at)], value), *at)

    return emit_nest(bb, "index_put", [x, values, *indices], [(shape, dtype)], write)


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    rank = max(len(s) for s in shapes)
    padded = [[1] * (rank - len(s)) + list(s) for s in shapes]
    return [next((n for n in column if n != 1), 1) for column in zip(*padded, strict=True)]


def _element(buffer: Buffer, i: tuple[Any, ...]) -> Expr:
    """Return the element of ``buffer``, broadcast to a larger shape, at the indices ``i``."""
    zero = constant(0, "int64")
    last = i[len(i) - len(buffer.shape) :]
    at = [zero if int(n) == 1 else k for n, k in zip(buffer.shape, last, strict=True)]
    return buffer[tuple(at)]


# Loops for ``scatter_reduce`` that keeps the elements of its first operand.
REDUCED: dict[str, Compile] = {
    "amax": _scatter(larger),
    "amin": _scatter(smaller),
    "prod": _scatter(lambda old, new: old * new),
}
SCATTERS: dict[str, Compile] = {
    "aten.scatter.src": _scatter(_replace),
    "aten.scatter.value": _scatter(_replace),
    "aten.scatter_add.default": _scatter(added),
    "aten.index_put.default": _index_put,
}

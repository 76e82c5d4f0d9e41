"""The index of the largest or smallest element: the first of equal ones, or the first NaN.

The first loop computes the extremum, the second one the least index that has it. LLVM can vectorize
each of them, but not one reduction of pairs of a value and an index.
"""

from __future__ import annotations

from math import prod

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.broadcast import REDUCTION, shape_of
from tvmbridge.legalize.functions import FLOATS, is_nan
from tvmbridge.legalize.lets import constant
from tvmbridge.legalize.reductions import cast, reduce, reducer_for, static_shape


def _place(x: te.Tensor, axis: int, kind: str, keep: bool) -> te.Tensor:
    """Return the index of the extremum along ``axis``; ``kind`` is ``"max"`` or ``"min"``."""
    dtype, shape = str(x.dtype), static_shape(x)
    best = reduce(x, [axis], reducer_for(kind, dtype), f"T_{kind}", True)

    def candidate(*i: Expr) -> Expr:
        value = x(*i)
        top = best(*[constant(0, "int64") if a == axis else n for a, n in enumerate(i)])
        found = value.equal(top)
        if dtype in FLOATS:
            found = tirx.Or(found, is_nan(value))
        # TVM may narrow an int64 index to int32; then the branches of the select would differ.
        place = tirx.Cast("int32", i[axis])
        return tirx.Select(found, place, constant(shape[axis], "int32"))

    places = te.compute(x.shape, candidate, name="T_candidates")
    least = reduce(places, [axis], reducer_for("min", "int32"), "T_least", keep)
    return cast(least, "int64", f"T_arg{kind}")


def _arg_extremum(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    kind = arguments.op.split(".")[1].removeprefix("arg")
    dim, keep = arguments["dim"], bool(arguments["keepdim"])
    x = arguments["self"]
    rank = len(shape_of(x))
    if dim is None:
        size = prod(shape_of(x))
        x, rank, dim, keep = bb.emit(relax.op.reshape(x, (size,))), 1, 0, False
    axis = dim % rank

    def compute(values: te.Tensor) -> te.Tensor:
        return _place(values, axis, kind, keep)

    attrs = {"op_pattern": REDUCTION}
    found = bb.call_te(compute, x, primfunc_name_hint=f"arg{kind}", primfunc_attrs=attrs)
    return relax.op.reshape(bb.emit(found), shape_of(call)) if arguments["dim"] is None else found


EXTREMA: dict[str, Compile] = {
    "aten.argmax.default": _arg_extremum,
    "aten.argmin.default": _arg_extremum,
}

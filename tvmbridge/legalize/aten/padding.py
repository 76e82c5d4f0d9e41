"""Loops for padding by amounts that depend on sizes.

Relax code for a known padding concatenates edges, and has none for an amount of 0. Code for any
size may not differ between amounts of 0 and 1, so that each element compares its place instead.
"""

from __future__ import annotations

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.broadcast import INJECTIVE, shape_of
from tvmbridge.legalize.lets import constant


def _pad(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    x, amounts = arguments["self"], arguments["pad"]
    extents = shape_of(x)
    first = {len(extents) - 1 - i: amount for i, amount in enumerate(amounts[::2])}
    fill = constant(arguments["value"], str(x.ty.dtype.dtype))

    def element(source: te.Tensor, indices: tuple[Expr, ...]) -> Expr:
        places, inside = list(indices), []
        for axis, amount in first.items():
            # TVM would simplify a comparison with a known extent and a difference from 0, and
            # merge the dimensions of the input where the amounts are 0.
            extent, before = (opaque(constant(n, "int64")) for n in (extents[axis], amount))
            places[axis] = opaque(indices[axis] - before)
            inside += [places[axis] >= 0, places[axis] < extent]
        return tirx.if_then_else(tirx.all(*inside), source(*places), fill)

    def compute(source: te.Tensor) -> te.Tensor:
        return te.compute(shape_of(call), lambda *i: element(source, i), name="T_pad")

    attrs = {"op_pattern": INJECTIVE}
    return bb.call_te(compute, x, primfunc_name_hint="pad", primfunc_attrs=attrs)


PADDING: dict[str, Compile] = {"aten.constant_pad_nd.default": _pad}

"""Emit loops of element-wise operators whose operands broadcast, with their fusion pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax, te
from tvm.ir import Call, Expr

from tvmbridge.legalize.lets import constant

#: TVM's numbers of operator patterns, which decide how FuseOps may fuse a function with others.
ELEMENTWISE, BROADCAST, INJECTIVE, REDUCTION, OPAQUE = 0, 1, 2, 3, 8


def shape_of(tensor: Expr) -> list[int]:
    """Return the static shape of a Relax tensor."""
    return [int(extent) for extent in tensor.ty.shape.values]


def element_of(x: te.Tensor, indices: tuple[Expr, ...]) -> Expr:
    """Return the element of ``x``, broadcast to a larger shape, at ``indices``."""
    last = indices[len(indices) - len(x.shape) :]
    zero = constant(0, "int64")
    return x(*[zero if int(n) == 1 else i for n, i in zip(x.shape, last, strict=True)])


def emit_broadcast(
    bb: relax.BlockBuilder,
    call: Call,
    operands: Sequence[Expr | None],
    element: Callable[[list[Expr | None]], Expr],
    name: str,
    hint: str,
) -> Expr:
    """Emit a call of loops that compute the result of ``call`` element by element.

    Args:
        operands: the operands of the call: tensors, and None for each number.
        element: returns an element of the result from a list of the operands' elements, with None
            for each number.
        name: the name of the result in the loops.
        hint: the name of the function.
    """
    shape = shape_of(call)
    tensors = [operand for operand in operands if operand is not None]

    def compute(*args: te.Tensor) -> te.Tensor:
        def at(*i: Expr) -> Expr:
            rest = iter(args)
            return element([None if o is None else element_of(next(rest), i) for o in operands])

        return te.compute(shape, at, name=name)

    same = all(shape_of(tensor) == shape for tensor in tensors)
    attrs = {"op_pattern": ELEMENTWISE if same else BROADCAST}
    return bb.call_te(compute, *tensors, primfunc_name_hint=hint, primfunc_attrs=attrs)

"""Loops over a result to which tensors and numbers broadcast, and how such loops may be fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax, te
from tvm.ir import Call, Expr

from tvmbridge.legalize.lets import constant

#: relax.op.transform pattern numbers: how FuseOps may combine a function with its neighbours.
ELEMENTWISE, BROADCAST, INJECTIVE, REDUCTION, OPAQUE = 0, 1, 2, 3, 8


def shape_of(tensor: Expr) -> list[int]:
    """The static shape of a Relax tensor."""
    return [int(extent) for extent in tensor.ty.shape.values]


def element_of(x: te.Tensor, indices: tuple[Expr, ...]) -> Expr:
    """The element of ``x`` that its broadcast has at ``indices``."""
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
    """A call of loops that compute each element of ``call``'s result.

    Args:
        bb: where the function and the call are emitted.
        call: what is replaced; it has the result's shape.
        operands: the tensors among its operands, and None for the numbers.
        element: computes an element from those of the tensors; None where a number stands.
        name: what the result is called in the loops.
        hint: what the function is called.
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

"""Find bindings in a joint function that compute nothing, such as copies and ``x * 1``."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from tvmbridge.passes.base import dtype_of, shape_of
from tvmbridge.passes.relax.constants import uniform_value

_KEEPS_SHAPE = ("relax.collapse_sum_to", "relax.broadcast_to", "relax.reshape")
_VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze")
_NEUTRAL = {
    "relax.multiply": (1.0, True),
    "relax.divide": (1.0, False),
    "relax.add": (0.0, True),
    "relax.subtract": (0.0, False),
}


def superfluous(function: relax.Function) -> list[str]:
    """Return a description of each binding of ``function`` that computes nothing."""
    bound = {b.var: b.value for block in function.body.blocks for b in block.bindings}
    return [
        f"{var.name}: {reason}" for var, value in bound.items() for reason in _reasons(value, bound)
    ]


def _reasons(value: relax.Expr, bound: dict[relax.Var, relax.Expr]) -> Iterator[str]:
    if isinstance(value, relax.Var | tvm.ir.GenericConst):
        yield "a plain copy"
    if isinstance(value, relax.TupleGetItem):
        source = bound.get(value.tuple_value)
        if isinstance(source, relax.Tuple):
            yield "an element of a tuple that was just made"
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return
    name = value.op.name
    if name.endswith("_like") or name.startswith("relax.grad.no_grad"):
        yield name
    if name in _KEEPS_SHAPE and shape_of(value.args[0]) == shape_of(value):
        yield f"{name} to the same shape"
    if name == "relax.collapse_sum_to":
        yield f"{name}, which is a sum over named axes"
    if name == "relax.astype" and dtype_of(value.args[0]) == dtype_of(value):
        yield f"{name} to the same dtype"
    if name == "relax.permute_dims" and _axes(value) == list(range(len(_axes(value)))):
        yield f"{name} that keeps the order"
    yield from _chains(name, value, bound)
    yield from _neutral_operands(name, value, bound)


def _chains(name: str, value: relax.Call, bound: dict[relax.Var, relax.Expr]) -> Iterator[str]:
    inner = bound.get(value.args[0]) if value.args else None
    if not isinstance(inner, relax.Call):
        return
    inner_name = getattr(inner.op, "name", "")
    if name in _VIEWS and inner_name in _VIEWS:
        yield f"{name} of {inner_name}"
    if name == inner_name == "relax.permute_dims":
        yield f"{name} of {name}"


def _axes(call: relax.Call) -> list[int]:
    rank = call.args[0].ty.ndim
    if call.attrs.axes is None:
        return list(reversed(range(rank)))
    return [int(a) % rank for a in call.attrs.axes]


def _neutral_operands(
    name: str, value: relax.Call, bound: dict[relax.Var, relax.Expr]
) -> Iterator[str]:
    if name not in _NEUTRAL:
        return
    number, either_side = _NEUTRAL[name]
    for i, operand in enumerate(value.args):
        if (either_side or i == 1) and uniform_value(operand, bound.get) == number:
            other = value.args[1 - i]
            if dtype_of(other) == dtype_of(value):
                yield f"{name} with {number:g}"

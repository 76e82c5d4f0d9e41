"""Operators that take their shape from another tensor become operators of an explicit shape.

Before::

    g = R.ones_like(x)
    s = R.collapse_sum_to(dy, R.shape([768]))       # dy: (256, 768)
    b = R.broadcast_to(x, R.shape([256, 768]))      # x: (256, 768)

After::

    g = R.ones((256, 768))
    s = R.sum(dy, axis=[0])
    b = x

TVM's Gradient emits many ``*_like``, ``collapse_sum_to`` and ``broadcast_to``. With static shapes
each is a constant, a sum over known axes, or the operand itself.

Requires: static shapes (others are declined). Guarantees: no ``*_like`` operator, and no
``collapse_sum_to``, ``broadcast_to``, ``reshape`` or ``astype`` that changes nothing.
Runs after: Gradient. Runs before: OneZapp, ZeroZapp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls, shape_of


@dataclass(frozen=True)
class ZappLike(RelaxPass):
    """Replace operators that take their shape from a tensor by operators of an explicit shape."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_calls(mod, lambda call, builder: _with_shapes(call, builder, report))


def _with_shapes(call: relax.Call, builder: relax.BlockBuilder, report: PassReport) -> relax.Expr:
    if not isinstance(call.op, tvm.ir.Op) or call.op.name not in _REWRITES:
        return call
    if not isinstance(call.ty, relax.TensorType):
        call = builder.normalize(call)
    if shape_of(call) is None or shape_of(call.args[0]) is None:
        report.decline(call.op.name, "the shape is not static")
        return call
    rewritten = _REWRITES[call.op.name](call, builder)
    if rewritten is None:
        return call
    report.rewrote()
    return rewritten


def _filled(call: relax.Call, value: relax.Expr) -> relax.Expr:
    return relax.op.full(shape_of(call), value, dtype_of(call))


def _fill_with(number: float) -> Callable[[relax.Call, relax.BlockBuilder], relax.Expr | None]:
    return lambda call, builder: _filled(call, relax.const(number, dtype_of(call)))


def _full_like(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr | None:
    value = call.args[1]
    if dtype_of(value) != dtype_of(call):
        value = builder.emit(relax.op.astype(value, dtype_of(call)))
    return _filled(call, value)


def _collapse_sum(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr | None:
    source, target = call.args[0], shape_of(call)
    shape = shape_of(source)
    assert shape is not None, "declined before"
    assert target is not None, "declined before"
    if shape == target:
        return source
    lead = len(shape) - len(target)
    axes = [*range(lead)]
    axes += [lead + i for i, extent in enumerate(target) if extent == 1 and shape[lead + i] != 1]
    if all(shape[axis] == 1 for axis in axes):
        return relax.op.reshape(source, target)
    total = builder.emit(relax.op.sum(source, axes))
    return total if shape_of(total) == target else relax.op.reshape(total, target)


def _if_shape_stays(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr | None:
    return call.args[0] if shape_of(call.args[0]) == shape_of(call) else None


def _if_dtype_stays(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr | None:
    return call.args[0] if dtype_of(call.args[0]) == dtype_of(call) else None


_REWRITES: dict[str, Callable[[relax.Call, relax.BlockBuilder], relax.Expr | None]] = {
    "relax.zeros_like": _fill_with(0),
    "relax.ones_like": _fill_with(1),
    "relax.full_like": _full_like,
    "relax.collapse_sum_to": _collapse_sum,
    "relax.collapse_sum_like": _collapse_sum,
    "relax.broadcast_to": _if_shape_stays,
    "relax.reshape": _if_shape_stays,
    "relax.astype": _if_dtype_stays,
}

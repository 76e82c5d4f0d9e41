"""Find expressions whose elements all equal one known number, for OneZapp and ZeroZapp."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from tvmbridge.passes.base import shape_of

Lookup = Callable[[relax.Var], relax.Expr | None]

_FILLS = {"relax.ones": 1.0, "relax.zeros": 0.0}
_MOVES_ONLY = ("relax.broadcast_to", "relax.reshape", "relax.expand_dims")
_LARGEST = 1 << 16


def uniform_value(expr: relax.Expr, lookup: Lookup) -> float | None:
    """Return the number that all elements of ``expr`` are known to equal, or None.

    ``lookup`` returns the value that a variable is bound to, or None.
    """
    while isinstance(expr, relax.Var):
        bound = lookup(expr)
        if bound is None:
            return None
        expr = bound
    if isinstance(expr, tvm.ir.GenericConst):
        return _uniform_constant(expr)
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, tvm.ir.Op):
        return None
    name = expr.op.name
    if name in _FILLS:
        return _FILLS[name]
    if name == "relax.full":
        return _converted(uniform_value(expr.args[1], lookup))
    if name == "relax.astype":
        return _converted(uniform_value(expr.args[0], lookup))
    if name in _MOVES_ONLY:
        return uniform_value(expr.args[0], lookup)
    return None


def _converted(value: float | None) -> float | None:
    """Return ``value`` if it is the same in every dtype, otherwise None: 2.5 as an integer is 2."""
    return value if value in (0.0, 1.0) else None


def _uniform_constant(constant: tvm.ir.GenericConst) -> float | None:
    shape = shape_of(constant)
    if shape is None or 0 in shape:
        return None
    count = 1
    for extent in shape:
        count *= extent
    if count > _LARGEST:
        return None
    values = constant.value.numpy().reshape(-1)
    first = values[0]
    return float(first) if bool((values == first).all()) else None

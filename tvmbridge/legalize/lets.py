"""A builder of nested ``Let`` expressions, which compute a value once and read it several times.

In a plain expression tree, an argument that a polynomial reads many times is copied as often. So
every function of :mod:`tvmbridge.legalize` binds its intermediate values.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr


class Lets:
    """Collects bindings in order; :meth:`close` wraps them around a body."""

    def __init__(self) -> None:
        self._bindings: list[tuple[tirx.Var, Expr]] = []

    def bind(self, value: Expr, name: str = "t") -> tirx.Var:
        """Bind ``value`` to a new variable, and return the variable."""
        var = tirx.Var(name, dtype_of(value))
        self._bindings.append((var, value))
        return var

    def close(self, body: Expr) -> Expr:
        """Return ``body`` with every binding around it, the first outermost."""
        for var, value in reversed(self._bindings):
            body = tirx.Let(var, value, body)
        return body


def dtype_of(value: Expr) -> str:
    """Return the dtype string of a scalar expression."""
    return str(value.ty.dtype)


def constant(value: float, dtype: str) -> Expr:
    """Return the number ``value`` as an immediate of ``dtype``."""
    return tirx.const(value, dtype)


def horner(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Evaluate ``c[0] + c[1] x + c[2] x^2 + ...`` in the dtype of ``x``."""
    dtype = dtype_of(x)
    result = constant(coefficients[-1], dtype)
    for c in reversed(coefficients[:-1]):
        result = result * x + constant(c, dtype)
    return result

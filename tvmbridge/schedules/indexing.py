"""Index expressions: create them, simplify them over known ranges, and split them along axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Range
from tvm.sym import Analyzer

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.schedules.reader import Axis, Buffer, mentions, substitute


def integer(value: int) -> Expr:
    """Return an index constant."""
    return tirx.IntImm("int64", value)


def index_var(name: str) -> tirx.Var:
    """Return a fresh index variable."""
    return tirx.Var(name, "int64")


class Indexer:
    """Simplifies index expressions over variables with known ranges."""

    def __init__(self, ranges: Mapping[tirx.Var, int] | None = None) -> None:
        self._analyzer = Analyzer()
        self._positions: dict[tirx.Var, Expr] = {}
        self._numbers: dict[tirx.Var, int] = {}
        for var, extent in (ranges or {}).items():
            self.bind(var, extent)

    def bind(self, var: tirx.Var, extent: int) -> None:
        """Declare that ``var`` is in [0, extent)."""
        self._numbers.setdefault(var, len(self._numbers))
        # A variable that is always 0 at these sizes may not be at others.
        self._analyzer.bind(var, Range(0, max(extent, 2 if sizes_vary() else 1)))

    def position(self, value: Expr, extent: int) -> tirx.Var:
        """Return a variable that stands for ``value``, in [0, extent).

        Offsets are simplified with the variable first, and then with its value. With the value
        alone, the simplifier rewrites the quotient and the remainder of a sum in different ways. It
        then no longer finds that both belong to one position.
        """
        var = index_var("position")
        self.bind(var, extent)
        self._positions[var] = substitute(value, self._positions)
        return var

    def simplify(self, index: Expr) -> Expr:
        """Return a simpler equal expression."""
        if isinstance(index, tirx.IntImm | tirx.Var):
            return index
        return self._simplified(index)

    def _simplified(self, index: Expr) -> Expr:
        """Return a simpler equal expression, in code for any size with its terms in one order.

        TVM orders remainders in a sum by their divisors, which may be sizes.
        """
        simple = self._analyzer.simplify(index)
        if _is_one_term(simple) or not sizes_vary():
            return simple
        return in_order(simple, self._numbers)

    def flat(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr:
        """Return the row-major offset of an element of ``buffer``."""
        offset: Expr = integer(0)
        if sizes_vary():
            indices = [_apart_by_strides(index) for index in indices]
        for index, extent in zip(indices, buffer.shape, strict=True):
            offset = offset * integer(int(extent)) + index
        if not self._positions:
            return self._simplified(offset)
        offset = self._analyzer.simplify(offset)
        return self._simplified(substitute(offset, self._positions))

    def lies_in(self, index: Expr, extent: int) -> bool:
        """Whether ``index`` is known to be in [0, extent)."""
        bound = self._analyzer.const_int_bound(index)
        return bound.min_value >= 0 and bound.max_value < extent

    def start_of(self, flat: Expr, lane: tirx.Var) -> Expr | None:
        """Return ``flat`` at lane 0 if it increases by one from lane to lane, else None."""
        if not mentions(flat, lane):
            return None
        start = self._simplified(substitute(flat, {lane: integer(0)}))
        return start if self._analyzer.can_prove_equal(flat, start + lane) else None

    def is_multiple(self, index: Expr, factor: int) -> bool:
        """Whether ``index`` is known to be a multiple of ``factor``."""
        known = self._analyzer.modular_set(index)
        return known.coeff % factor == 0 and known.base % factor == 0

    def coefficient(self, flat: Expr, var: tirx.Var) -> int | None:
        """Return the constant by which ``flat`` grows with ``var``; None if it is not constant."""
        if not mentions(flat, var):
            return 0
        step = self._analyzer.simplify(substitute(flat, {var: var + integer(1)}) - flat)
        return int(step) if isinstance(step, tirx.IntImm) else None


def in_order(expr: Expr, numbers: Mapping[tirx.Var, int]) -> Expr:
    """Return an equal expression whose sums have their terms in an order that no integer decides.

    Args:
        numbers: different numbers of variables; others have the same place.
    """

    def text(part: Any) -> str:
        if isinstance(part, tirx.Var):
            return f"{numbers.get(part, -1):6}"
        operands = (text(getattr(part, side)) for side in ("a", "b") if hasattr(part, side))
        return f"{type(part).__name__}({','.join(operands)})"

    def terms(part: Expr, sign: int) -> list[tuple[str, int, Expr]]:
        if isinstance(part, tirx.Add | tirx.Sub):
            other = -sign if isinstance(part, tirx.Sub) else sign
            return [*terms(part.a, sign), *terms(part.b, other)]
        return [(text(part), sign, part)]

    def ordered(part: Any) -> Any:
        found = sorted(terms(part, 1), key=lambda term: (-term[1], term[0]))
        (_, sign, total), *rest = found
        if sign < 0:
            return part
        for _, sign, term in rest:
            total = total + term if sign > 0 else total - term
        return total

    return tvm_ffi.structural_map(expr, ((tirx.Add, tirx.Sub), ordered))


# TVM's walk over an expression takes longer than these tests, which most indices pass.
_ATOMS = (tirx.IntImm, tirx.Var)


def _is_one_term(expr: Expr) -> bool:
    """Whether an expression is an atom or a product of atoms; False if this takes a walk."""
    if isinstance(expr, tirx.Mul):
        return isinstance(expr.a, _ATOMS) and isinstance(expr.b, _ATOMS)
    return isinstance(expr, _ATOMS)


def _apart_by_strides(index: Expr) -> Expr:
    """Return ``index`` with opaque quotients and remainders wherever a stride multiplies them.

    An image of 8 rows is 2 times as high as its windows, and one of 9 rows is not. TVM would merge
    the row of the window with the number of the image in the first case alone, and code for any
    size must not differ between the two.
    """

    if _is_one_term(index):
        return index

    def scaled(part: tirx.Mul) -> Expr:
        if not isinstance(part.b, tirx.IntImm) or not has_division(part.a):
            return part
        opaque = tirx.reinterpret("int64", tirx.reinterpret("float64", part.a))
        return tirx.Mul(opaque, part.b)

    found: Expr = tvm_ffi.structural_map(index, (tirx.Mul, scaled))
    return found


def has_division(part: tirx.Stmt | Expr) -> bool:
    """Whether a statement or an expression has a quotient or a remainder."""
    found: list[Any] = []
    tvm_ffi.structural_walk(part, ((tirx.FloorDiv, tirx.FloorMod), found.append))
    return bool(found)


def divisors_of(index: Expr, var: tirx.Var) -> list[int]:
    """Return the divisors of all quotients and remainders of ``var`` in ``index``."""
    found: list[int] = []

    def note(part: Any) -> None:
        if part.a.same_as(var) and isinstance(part.b, tirx.IntImm):
            found.append(int(part.b))

    tvm_ffi.structural_walk(index, ((tirx.FloorDiv, tirx.FloorMod), note))
    return found


def unravel(position: Expr, axes: Sequence[Axis], indexer: Indexer) -> dict[Any, Expr]:
    """Return the value of each axis at a position in their row-major order."""
    values: dict[Any, Expr] = {}
    stride = prod(axis.extent for axis in axes)
    first = True
    for axis in axes:
        if axis.extent == 1:
            values[axis.var] = integer(0)
            continue
        stride //= axis.extent
        value = position // integer(stride) if stride > 1 else position
        values[axis.var] = indexer.simplify(value if first else value % integer(axis.extent))
        first = False
    return values


def split_axes(axes: Sequence[Axis], rows: int) -> tuple[Sequence[Axis], Sequence[Axis]] | None:
    """Split axes, none divided, into leading ones of ``rows`` elements and the rest, or None."""
    for cut in range(len(axes), -1, -1):
        if prod(axis.extent for axis in axes[:cut]) == rows:
            return axes[:cut], axes[cut:]
    return None


def cut_axes(
    axes: Sequence[Axis], rows: int
) -> tuple[Sequence[Axis], Sequence[Axis], Mapping[Any, Expr]] | None:
    """Split axes as :func:`split_axes` does, but inside an axis, which becomes two axes.

    Returns:
        The leading axes, the other axes, and the value of the axis that was split as an expression
        of its two parts. None if the axes cannot be split in this way.
    """
    before = 1
    for place, axis in enumerate(axes):
        if rows % before == 0 and before < rows < before * axis.extent:
            count = rows // before
            if axis.extent % count:
                return None
            outer = Axis(index_var("outer"), count, axis.reduce)
            inner = Axis(index_var("inner"), axis.extent // count, axis.reduce)
            value = outer.var * integer(inner.extent) + inner.var
            return (*axes[:place], outer), (inner, *axes[place + 1 :]), {axis.var: value}
        before *= axis.extent
    return None

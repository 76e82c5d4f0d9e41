"""Sizes in a symbolic trace, as functions of the symbols of the code.

PyTorch's trace of a strided convolution, for example, has the expression ``(s - 1)//2 + 1``. The
numbers of compiled code are compared with these functions first, and with guesses afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]

from tvmbridge.graph_capture.any_size import SymbolicTrace
from tvmbridge.graph_capture.relations import affine, expressions_in
from tvmbridge.symbolic.size import Size
from tvmbridge.symbolic.symbols import Symbols

# Classes of PyTorch for integers computed as floats, by name as well.
_OF_FLOATS = ("TruncToInt", "FloorToInt", "ToFloat")
# Expressions whose remainders repeat after more steps are left out.
_MOST_PERIOD = 64
# Classes of PyTorch for quotients and remainders, by name because they are private.
_QUOTIENTS, _REMAINDERS = ("FloorDiv", "CleanDiv"), ("Mod", "PythonMod")


def traced_sizes(trace: SymbolicTrace, symbols: Symbols) -> list[Size]:
    """Return the sizes in the shapes of ``trace`` that depend on ``symbols``, each one once.

    Expressions other than polynomials, quotients and remainders of polynomials by an integer, and
    what can be written as such a quotient, are left out.
    """
    places = [sympy.Symbol(f"size{i}", integer=True) for i in range(len(symbols.dimensions))]
    known = _values(trace, symbols, places)
    found: dict[Size, None] = {}
    for expression in expressions_in(trace.program):
        expression = expression.subs(trace.relations.replaced).subs(known)
        size = _size(expression, places)
        if size is not None:
            found.setdefault(size)
    return list(found)


def _values(trace: SymbolicTrace, symbols: Symbols, places: Sequence[Any]) -> dict[Any, Any]:
    """Return the symbols of the trace as expressions of ``places``, the symbols of the code."""
    known: dict[Any, Any] = {}
    for place, dimensions in zip(places, symbols.dimensions, strict=True):
        for dimension in dimensions:
            leaf, number = dimension
            found = affine(trace.relations.shapes[leaf][number])
            if found is not None:
                symbol, scale, offset = found
                form = symbols.form(dimension)
                if not form.scale % scale and not (form.offset - offset) % scale:
                    value = form.scale // scale * place + (form.offset - offset) // scale
                    known.setdefault(symbol, value)
    return known


def _size(expression: Any, places: Sequence[Any]) -> Size | None:
    """Return ``expression`` as a size; None if it is a number, or of another form."""
    if not expression.free_symbols or not expression.free_symbols <= set(places):
        return None
    atoms: dict[Any, Size] = {}
    for function in expression.atoms(sympy.Function):
        atom = _atom(function, places)
        if atom is None:
            return _of_one_quotient(expression, places)
        atoms[function] = atom
    if expression in atoms:
        return atoms[expression]
    padded = any(atom.remainder for atom in atoms.values())
    whole = _of_one_quotient(expression, places) if padded else _absorbed(expression, atoms)
    if whole is not None:
        return whole
    names = {function: sympy.Dummy(integer=True) for function in atoms}
    terms = _terms(expression.subs(names), [*places, *names.values()])
    return None if terms is None else Size(terms, atoms=tuple(atoms.values()))


def _of_one_quotient(expression: Any, places: Sequence[Any]) -> Size | None:
    """Return ``a * ((b * s + c)//d)`` if ``expression`` is such a size of one symbol, else None.

    Images padded to an even size have ``(s + s % 2)//2`` rows of two, which is ``(s + 1)//2``; half
    as many again are ``TruncToInt(1.5 * ToFloat(s))``, which is ``(3 * s)//2``.
    """
    period = _period(expression)
    if period is None or len(expression.free_symbols) > 1:
        return None
    (symbol,) = expression.free_symbols
    # Both functions grow by a constant in each period: equal in two periods, they are equal.
    known = [expression.subs(symbol, n) for n in range(2 * period + 1)]
    if not all(value.is_Integer for value in known):
        return None
    values = [int(value) for value in known]
    factor = math.gcd(*(v - values[0] for v in values))
    scale = values[period] - values[0]
    if not factor or scale < 1 or values[0] % factor:
        return None
    scale, values = scale // factor, [v // factor for v in values]
    constants = (
        c
        for c in range(period * values[0], period * (values[0] + 1))
        if all((scale * n + c) // period == v for n, v in enumerate(values))
    )
    constant = next(constants, None)
    if constant is None:
        return None
    shared = math.gcd(scale, period)
    one, none = (tuple(n * (p == symbol) for p in places) for n in (1, 0))
    terms = ((scale // shared, one), (constant // shared, none))
    quotient = Size(tuple(t for t in terms if t[0]), period // shared)
    if factor == 1:
        return quotient
    return Size(((factor, (*none, 1)),), atoms=(quotient,))


def _period(expression: Any) -> int | None:
    """Return a number of steps after which the remainders in ``expression`` repeat, or None."""
    period = 1
    for part in sympy.preorder_traversal(expression):
        name = type(part).__name__
        if name in (*_QUOTIENTS, *_REMAINDERS) and part.args[1].is_Integer and part.args[1] > 0:
            # A quotient of a quotient repeats after the product of both divisors.
            period *= int(part.args[1])
        elif isinstance(part, sympy.Float):
            period *= Fraction(float(part)).denominator
        elif isinstance(part, sympy.Function | sympy.Pow) and name not in _OF_FLOATS:
            return None
        if period > _MOST_PERIOD:
            return None
    return period


def _absorbed(expression: Any, atoms: Mapping[Any, Size]) -> Size | None:
    """Return a quotient plus an integer as one quotient: ``(s - 1)//2 + 1`` is ``(s + 1)//2``.

    Such an extent is then an atom, and the elements of an image are a product of two atoms.
    """
    for function, atom in atoms.items():
        more = expression - function
        if more.is_Integer and not atom.remainder:
            constant = (0,) * len(atom.terms[0][1])
            terms = {powers: n for n, powers in atom.terms}
            terms[constant] = terms.get(constant, 0) + int(more) * atom.divisor
            left = tuple((n, powers) for powers, n in terms.items() if n)
            return Size(left, atom.divisor)
    return None


def _atom(function: Any, places: Sequence[Any]) -> Size | None:
    """Return a quotient or a remainder of a polynomial by an integer as a size, or None."""
    name = type(function).__name__
    if name not in (*_QUOTIENTS, *_REMAINDERS):
        return None
    of, divisor = function.args
    terms = _terms(of, places)
    if terms is None or not divisor.is_Integer or divisor < 1:
        return None
    return Size(terms, int(divisor), name in _REMAINDERS)


def _terms(
    expression: Any, variables: Sequence[Any]
) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return the terms of a polynomial with integer coefficients; None if it is another function.

    A size that is no sum has the same terms as the size that is guessed from its values.
    """
    polynomial = expression.as_poly(*variables)
    if polynomial is None or not all(c.is_Integer for c in polynomial.coeffs()):
        return None
    return tuple((int(c), tuple(map(int, powers))) for powers, c in polynomial.terms())

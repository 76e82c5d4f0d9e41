"""Related sizes: sizes that forward requires to be a multiple, or another size plus a constant.

A cache of ``s`` places has a mask of ``s + 1`` places. A network that halves images twice needs
sizes ``4 * s``. Symbolic code then has the symbol ``s`` alone.
A mask for two arguments has ``s + t`` places: its size is derived from two symbols.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence, Set
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.relations import Relations, affine
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.symbols import DerivedSize, Dimension, LinearSize, Symbols

# Prime values for symbols: sizes are then multiples of their unit and of little else.
_GENERIC = (17, 23, 29, 37, 41, 43, 47, 53), (3, 5, 7, 11, 13, 17, 19, 23)

# How many symbols there may be beside those for the sizes that differed in calls, where forward
# does not relate equal sizes. Each symbol adds a sample size.
_MOST_APART = 1


def related(
    symbols: Symbols, relations: Relations, sample: Arguments, seen: Sequence[Point]
) -> Symbols:
    """Return symbols that express related sizes by one symbol, and have units if necessary.

    A unit is an integer: all sizes of the symbol grow in steps of it.

    Args:
        seen: the sizes of the symbols in known calls.
    """
    merged = _merged(symbols, relations)
    if symbols.equal:
        many = len(merged.dimensions) > len(set(symbols.equal)) + _MOST_APART
        joined = _merged(symbols.joined(), relations)
        # A loss demands as many labels as tokens: products of sizes are equal.
        if many or (not _hold(relations, merged, sample) and _hold(relations, joined, sample)):
            merged = joined
    shapes = [shapes_of(symbols.probe(*sample, point)) for point in seen]
    return _in_units(merged, relations, sample, [merged.point_of(each) for each in shapes])


def _hold(relations: Relations, symbols: Symbols, sample: Arguments) -> bool:
    """Whether all relations hold at unrelated values of the symbols; True for too many symbols."""
    number = len(symbols.dimensions)
    if number > len(_GENERIC[0]):
        return True
    here = symbols.point_of(shapes_of(sample))
    ranks = [sorted(range(number), key=here.__getitem__).index(i) for i in range(number)]
    # Forward may demand that one size is at most another one, as in the sample.
    points = (
        tuple(each[i] for i in order) for each in _GENERIC for order in (range(number), ranks)
    )
    probes = (shapes_of(symbols.probe(*sample, point)) for point in points)
    return any(relations.broken(shapes) is None for shapes in probes)


def _merged(symbols: Symbols, relations: Relations) -> Symbols:
    """Return the symbols, with dimensions merged whose sizes are linear in the same symbol."""
    groups: dict[Any, list[Dimension]] = {}
    forms = dict(symbols.forms)
    apart: list[tuple[Dimension, ...]] = []
    for dimensions in symbols.dimensions:
        leaf, number = dimensions[0]
        found = affine(relations.shapes[leaf][number])
        if found is None or any(d in symbols.forms for d in dimensions):
            apart.append(dimensions)
            continue
        symbol, scale, offset = found
        forms.update(dict.fromkeys(dimensions, LinearSize(scale, offset)))
        groups.setdefault(symbol, []).extend(dimensions)
    follows = _equations(relations, groups.keys())
    following = [d for symbol in follows for d in groups.pop(symbol)]
    for dimensions in list(apart):
        if all(_follows(relations.shapes[leaf][n], groups.keys()) for leaf, n in dimensions):
            apart.remove(dimensions)
            following += dimensions
    places = (*groups, *(sympy.Dummy(integer=True) for _ in apart))
    derived = {
        (leaf, number): DerivedSize(relations.shapes[leaf][number].subs(follows), places)
        for leaf, number in following
    }
    return Symbols((*map(tuple, groups.values()), *apart), forms, derived=derived)


def _equations(relations: Relations, symbols: Set[Any]) -> dict[Any, Any]:
    """Return those of ``symbols`` that forward demands to equal expressions of the others."""
    found: dict[Any, Any] = {}
    for guard in relations.guards:
        for symbol, value in (guard.args, guard.args[::-1]) if isinstance(guard, sympy.Eq) else ():
            used = {s for v in found.values() for s in v.free_symbols} | found.keys()
            if symbol in symbols and symbol not in used:
                others = symbols - found.keys() - {symbol}
                if _follows(value, others):
                    found[symbol] = value
    return found


def _follows(expression: Any, symbols: Collection[Any]) -> bool:
    """Whether a size depends on sizes, and on no others than ``symbols``."""
    return isinstance(expression, sympy.Basic) and set() < expression.free_symbols <= set(symbols)


def _in_units(
    symbols: Symbols, relations: Relations, sample: Arguments, seen: Sequence[Point]
) -> Symbols:
    """Return the symbols in the smallest units for which all relations of forward hold.

    If no units fit, return the symbols unchanged.
    """

    def fit(units: Sequence[int]) -> bool:
        return _hold(relations, _scaled(symbols, units), sample)

    units = [1] * len(symbols.dimensions)
    if fit(units):
        return symbols
    units = [math.gcd(*sizes) for sizes in zip(*seen, strict=True)]
    if not fit(units):
        return symbols
    for place, unit in enumerate(units):
        smaller = (n for n in range(1, unit) if not unit % n)
        fitting = (n for n in smaller if fit([*units[:place], n, *units[place + 1 :]]))
        units[place] = next(fitting, unit)
    return _scaled(symbols, units)


def divided(
    symbols: Symbols, trace: SymbolicTrace, sample: Arguments, seen: Sequence[Point]
) -> Symbols | None:
    """Return the symbols in units of what shapes in a trace divide sizes by, or None without such.

    For images that are cut into patches, the unit is a patch: the number of patches is then a
    product of symbols.

    Args:
        seen: the sizes of the symbols in known calls; they must be multiples of the units.
    """
    found: dict[Any, int] = {}
    for node in trace.program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(0)
                for quotient in expression.atoms(sympy.Function):
                    if type(quotient).__name__ != "FloorDiv":  # PyTorch's, a private class
                        continue
                    divisor, of = quotient.args[1], quotient.args[0].free_symbols
                    if divisor.is_Integer and len(of) == 1:
                        (symbol,) = of
                        found[symbol] = math.lcm(found.get(symbol, 1), int(divisor))
    units = []
    for dimensions, sizes in zip(symbols.dimensions, zip(*seen, strict=True), strict=True):
        leaf, number = dimensions[0]
        symbol, *_ = affine(trace.relations.shapes[leaf][number]) or (None,)
        units.append(math.gcd(found.get(symbol, 1), *sizes))
    scaled = _scaled(symbols, units)
    least = tuple(itertools.islice(_GENERIC[0], len(units)))
    right = trace.relations.broken(shapes_of(scaled.probe(*sample, least))) is None
    return scaled if right and math.prod(units) > 1 else None


def _scaled(symbols: Symbols, units: Sequence[int]) -> Symbols:
    forms = {
        d: LinearSize(symbols.form(d).scale * unit, symbols.form(d).offset)
        for dimensions, unit in zip(symbols.dimensions, units, strict=True)
        for d in dimensions
    }
    derived = {}
    for dimension, each in symbols.derived.items():
        values = [unit * place for unit, place in zip(units, each.places, strict=True)]
        derived[dimension] = each.with_values(values)
    return Symbols(symbols.dimensions, forms, derived=derived)

"""Related sizes: forward may require that a size is a multiple, or another symbol plus a number.

A cache with ``s`` positions has a mask of size ``s + 1``. A network that halves images twice may
require sizes ``4 * s``. The code then has the symbol ``s`` alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.functions import FloorDiv

from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.relations import Relations, affine
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.symbolic.sizes import Point
from tvmbridge.symbolic.symbols import Dimension, LinearSize, Symbols

# Two choices of values for symbols, with which a unit is tested. Being primes, the values are
# multiples of nothing else.
_GENERIC = (17, 23, 29, 37, 41, 43, 47, 53), (3, 5, 7, 11, 13, 17, 19, 23)


def related(
    symbols: Symbols, relations: Relations, sample: Arguments, seen: Sequence[Point]
) -> Symbols:
    """Return ``symbols`` with the dependencies between sizes that ``relations`` require.

    Sizes that depend linearly on one symbol share it, and sizes that must be multiples get a unit.

    Args:
        symbols: the symbolic dimensions.
        relations: the conditions on sizes of the trace.
        sample: arguments of some size.
        seen: the points of calls so far.
    """
    merged = _merged(symbols, relations)
    shapes = [shapes_of(symbols.probe(*sample, point)) for point in seen]
    return _in_units(merged, relations, sample, [merged.point_of(each) for each in shapes])


def _merged(symbols: Symbols, relations: Relations) -> Symbols:
    """Merge symbols whose sizes are linear functions of one symbol of the trace."""
    groups: dict[object, list[Dimension]] = {}
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
    return Symbols((*map(tuple, groups.values()), *apart), forms)


def _in_units(
    symbols: Symbols, relations: Relations, sample: Arguments, seen: Sequence[Point]
) -> Symbols:
    """Scale each symbol by the smallest unit whose multiples fulfil the relations.

    Return the symbols unchanged if no unit is needed, or if none is found.
    """

    def fit(units: Sequence[int]) -> bool:
        chosen = _scaled(symbols, units)
        points = (tuple(itertools.islice(each, len(units))) for each in _GENERIC)
        probes = (shapes_of(chosen.probe(*sample, point)) for point in points)
        return any(relations.broken(shapes) is None for shapes in probes)

    units = [1] * len(symbols.dimensions)
    if len(units) > len(_GENERIC[0]) or fit(units):
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
    """Scale each symbol by the number that shapes in the trace divide its sizes by.

    A vision model cuts images into patches: if the unit is the patch size, the number of patches
    is a product of symbols. None: nothing is divided, or the scaled sizes break a relation.

    Args:
        symbols: the symbolic dimensions.
        trace: the module traced with symbols.
        sample: arguments of some size.
        seen: the points of calls so far.
    """
    found: dict[Any, int] = {}
    for node in trace.program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(0)
                for quotient in expression.atoms(FloorDiv):
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
    return Symbols(symbols.dimensions, forms)

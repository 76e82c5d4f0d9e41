"""Kernels whose specs contain symbolic sizes; each call passes the values of the symbols.

In a spec, ``{"size": [terms, divisor, remainder, atoms]}`` is an integer that depends on symbols:

- ``terms``: a polynomial in the symbols and the atoms, as pairs of a coefficient and the powers.
- ``divisor``: the value is the polynomial divided by it, rounded down.
- ``remainder``: if true, the value is the polynomial modulo the divisor instead.
- ``atoms``: integers of the same kind (terms, divisor, remainder), without atoms of their own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, TypeAlias

from tvmbridge.kernels.callbacks import integers
from tvmbridge.kernels.keys import key_of, spec_named

# The suffix of the names of such kernels.
SIZED = ".sized"
SIZE = "size"


Terms: TypeAlias = Iterable[tuple[int, Sequence[int]]]
# Terms, divisor, and whether the value is the remainder.
Fields: TypeAlias = tuple[Terms, int, bool]


def value_of(
    terms: Terms,
    divisor: int,
    remainder: bool,
    point: Sequence[int],
    atoms: Iterable[Fields] = (),
) -> int:
    """Return the value of a size, given the values ``point`` of the symbols.

    The other arguments are described in the module's docstring.
    """
    point = [*point, *(value_of(*fields, point) for fields in atoms)]
    value = sum(
        coefficient * prod(x**power for x, power in zip(point, powers, strict=True))
        for coefficient, powers in terms
    )
    return value % divisor if remainder else value // divisor


def with_sizes(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` with another argument after the key: the values of the symbols.

    The values arrive as the bytes of int64. The sizes in the spec are replaced by numbers before
    ``kernel`` is called.
    """

    def run(key: str, point: bytes, *tensors: Any) -> Any:
        return kernel(key_at(key, point), *tensors)

    return run


def key_at(key: str, point: bytes) -> str:
    """Return the key of a spec whose sizes are replaced by numbers.

    Args:
        key: the key of the spec with sizes.
        point: the values of the symbols, as the bytes of int64.
    """
    return _key_at(key, integers(point))


@functools.lru_cache(maxsize=65536)
def _key_at(key: str, point: tuple[int, ...]) -> str:
    return key_of(json.dumps(_at(json.loads(spec_named(key)), point)))


def _at(value: Any, point: tuple[int, ...]) -> Any:
    if isinstance(value, list):
        return [_at(v, point) for v in value]
    if not isinstance(value, dict):
        return value
    if list(value) == [SIZE]:
        terms, divisor, remainder, atoms = value[SIZE]
        return value_of(terms, divisor, remainder, point, atoms)
    return {key: _at(v, point) for key, v in value.items()}

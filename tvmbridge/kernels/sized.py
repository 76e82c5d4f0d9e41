"""Kernels whose specs have sizes in them, which a call gets as its second argument.

In a spec ``{"size": [terms, divisor, remainder, atoms]}`` stands for an integer: a polynomial of
the symbols and of the atoms, by its coefficients and the power of each of these, or where the
divisor is not 1 its quotient, rounded down, or its remainder. Atoms are such integers, without
atoms of their own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, TypeAlias

from tvmbridge.kernels.callbacks import integers
from tvmbridge.kernels.keys import key_of, spec_named

# Behind the names of such kernels.
SIZED = ".sized"
SIZE = "size"


Terms: TypeAlias = Iterable[tuple[int, Sequence[int]]]
# Terms, divisor, and whether the remainder is meant.
Fields: TypeAlias = tuple[Terms, int, bool]


def value_of(
    terms: Terms,
    divisor: int,
    remainder: bool,
    point: Sequence[int],
    atoms: Iterable[Fields] = (),
) -> int:
    """A size where the symbols are ``point``."""
    point = [*point, *(value_of(*fields, point) for fields in atoms)]
    value = sum(
        coefficient * prod(x**power for x, power in zip(point, powers, strict=True))
        for coefficient, powers in terms
    )
    return value % divisor if remainder else value // divisor


def with_sizes(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, called with a spec, the values of the symbols as int64, and tensors."""

    def run(key: str, point: bytes, *tensors: Any) -> Any:
        return kernel(_key_at(key, integers(point)), *tensors)

    return run


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

"""Cut one tensor that compiled backward returns into the several gradients that it consists of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tvm

from tvmbridge.passes.base import flat_results
from tvmbridge.passes.relax.return_whole import Whole, wholes_of


class Pieces:
    """Cuts results of a compiled function into the results that its caller expects.

    The pass :mod:`tvmbridge.passes.relax.return_whole` makes one result of several.

    - ``wholes``: the results that are cut.
    - ``num_results``: the number of results of the function.
    """

    def __init__(self, wholes: Sequence[Whole], num_results: int) -> None:
        self.wholes = tuple(wholes)
        self.num_results = num_results
        cut = {whole.number for whole in self.wholes}
        uncut = [n for n in range(num_results) if n not in cut]
        self._count = len(uncut) + sum(len(whole.places) for whole in self.wholes)
        taken = {place for whole in self.wholes for place in whole.places}
        free = [place for place in range(self._count) if place not in taken]
        self._uncut = list(zip(uncut, free, strict=True))

    @classmethod
    def of_function(cls, function: tvm.relax.Function) -> Pieces:
        """Return the pieces of the results of ``function``."""
        return cls(wholes_of(function), len(flat_results(function)))

    def of(self, results: Sequence[Any]) -> list[Any]:
        """Return the results that the caller expects; each piece has its own version counter."""
        found: list[Any] = [None] * self._count
        for number, place in self._uncut:
            found[place] = results[number]
        for whole in self.wholes:
            pieces = results[whole.number].split(whole.extents, whole.axis)
            for place, piece in zip(whole.places, pieces, strict=True):
                found[place] = piece.data
        return found

    def places(self, numbers: Collection[int]) -> frozenset[int]:
        """Translate numbers of results of ``function`` to numbers of results for the caller."""
        found = {place for number, place in self._uncut if number in numbers}
        for whole in self.wholes:
            if whole.number in numbers:
                found.update(whole.places)
        return frozenset(found)

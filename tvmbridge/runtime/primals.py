"""Which of the inputs of compiled code are what, by their positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.core.types import InputDescriptor, InputKind, OutputKind


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns what stands at ``positions`` of a list."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple(values[p] for p in positions)


def primals_of(compiled: CompiledModule) -> list[InputDescriptor]:
    """The primals, but for packed weights, which are the last ones."""
    return [d for d in compiled.captured.inputs if d.kind is not InputKind.CONSTANT]


def packed_into(compiled: CompiledModule, reads: set[int]) -> list[int]:
    """Positions of the parameters whose packed values are among the primals ``reads``."""
    assert compiled.split is not None
    position = {
        d.target: i for i, d in enumerate(primals_of(compiled)) if d.kind is InputKind.PARAMETER
    }
    first = len(compiled.split.primals) - len(compiled.packs)
    packs = (names for i, names in enumerate(compiled.packs, start=first) if i in reads)
    return [position[name] for names in packs for name in names]


def overwritten_by(compiled: CompiledModule) -> frozenset[int]:
    """Positions of the primals that are written into after forward: statistics, arguments."""
    captured = compiled.captured
    written = {(o.kind, o.target) for o in captured.outputs if o.kind is not OutputKind.USER}
    return frozenset(
        i
        for i, d in enumerate(primals_of(compiled))
        if (OutputKind.INPUT_MUTATION, d.name) in written
        or (d.kind is InputKind.BUFFER and (OutputKind.BUFFER_MUTATION, d.target) in written)
    )

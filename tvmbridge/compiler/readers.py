"""Which cotangents meet which values in backward: what a write before backward would change.

A backward without some of the cotangents reads what these meet as well, but multiplies it by zero.
A write there changes no gradient, and eager PyTorch does not visit the formulas that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from tvmbridge.coloring import Coloring
from tvmbridge.differentiation.saved import SavedMemory


@dataclass(frozen=True)
class Readers:
    """For memory that the user holds, the numbers of the cotangents whose backward reads it.

    ``primals`` and ``outputs`` are those that compiled backward reads, ``guarded_primals`` and
    ``guarded_outputs`` the others that eager PyTorch saves. What is missing is read by all.
    """

    primals: Mapping[str, frozenset[int]]
    outputs: Mapping[int, frozenset[int]]
    guarded_primals: Mapping[str, frozenset[int]]
    guarded_outputs: Mapping[int, frozenset[int]]


NOBODY = Readers({}, {}, {}, {})


def readers_of(
    coloring: Coloring,
    cotangents: Sequence[relax.Var],
    reads: Sequence[relax.Var],
    kept: Mapping[relax.Var, int],
    saved: SavedMemory,
) -> Readers:
    """Who reads the primals ``reads`` and the outputs ``kept``, or has them saved in eager PyTorch.

    The gradients must be linear in the cotangents.
    """
    met = met_by(coloring, cotangents, [*reads, *kept])
    outputs: dict[int, frozenset[int]] = {}
    for var, number in kept.items():
        if number in saved.outputs:
            outputs[number] = outputs.get(number, saved.outputs[number]) | met[var]
    names = {v.name for v in reads}
    return Readers(
        primals={v.name: met[v] | saved.primals[v.name] for v in reads if v.name in saved.primals},
        outputs=outputs,
        guarded_primals={n: r for n, r in saved.primals.items() if r and n not in names},
        guarded_outputs={n: r for n, r in saved.outputs.items() if r and n not in outputs},
    )


def with_more_copies(
    coloring: Coloring,
    cotangents: Sequence[relax.Var],
    reads: Sequence[relax.Var],
    kept: Mapping[relax.Var, int],
    saved: SavedMemory,
) -> SavedMemory | None:
    """``saved``, where what a cotangent meets that it does not meet in eager PyTorch is copied.

    None: there is nothing more to copy.
    """
    met = met_by(coloring, cotangents, [*reads, *kept])
    primals = {v.name for v in reads if met[v] - saved.primals.get(v.name, met[v])}
    outputs = {n for v, n in kept.items() if met[v] - saved.outputs.get(n, met[v])}
    if primals <= saved.copied_primals and outputs <= saved.copied_outputs:
        return None
    return replace(
        saved,
        copied_primals=saved.copied_primals | primals,
        copied_outputs=saved.copied_outputs | outputs,
    )


def met_by(
    coloring: Coloring, cotangents: Sequence[relax.Var], values: Sequence[relax.Var]
) -> dict[relax.Var, frozenset[int]]:
    """For each of ``values`` the cotangents that are multiplied by what is computed of it."""
    nothing: frozenset[relax.Var] = frozenset()
    arriving = {v: frozenset([number]) for number, v in enumerate(cotangents)}
    # What values without a cotangent are computed from.
    sources = {v: frozenset([v]) for v in values}
    met: dict[relax.Var, frozenset[int]] = dict.fromkeys(values, frozenset())
    for binding in coloring.backward:
        operands = relax.analysis.free_vars(binding.value)
        arrived = frozenset[int]().union(*(arriving.get(v, frozenset()) for v in operands))
        read = nothing.union(*(sources.get(v, nothing) for v in operands))
        if not arrived:
            sources[binding.var] = read
            continue
        arriving[binding.var] = arrived
        for value in read:
            met[value] |= arrived
    return met

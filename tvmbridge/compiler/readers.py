"""Which cotangents read which user memory in backward, and so are affected by a write into it.

If a cotangent is absent, compiled backward still reads the values that belong to it, but multiplies
them by zero. A write into such a value changes no gradient, and must not raise: eager PyTorch does
not evaluate the formulas that read it.
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

    Memory that is in none of the mappings counts as read by all cotangents.

    - ``primals``: primals that compiled backward reads, by name.
    - ``outputs``: outputs that compiled backward reads, by number.
    - ``guarded_primals``, ``guarded_outputs``: primals and outputs that only eager PyTorch saves.
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
    """Return which cotangents read the primals ``reads`` and the outputs ``kept``.

    A cotangent counts as a reader also if eager PyTorch saves the memory for it. The gradients must
    be linear in the cotangents.
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
    """Return ``saved`` with further primals and outputs to copy; None if there are none.

    A primal or an output is copied if compiled backward reads it for a cotangent whose gradient
    does not depend on it in eager PyTorch: the user may then write it before backward.
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
    """Return, for each of ``values``, the cotangents that backward combines it with.

    A value is combined with a cotangent if one operator reads results of both.
    """
    nothing: frozenset[relax.Var] = frozenset()
    arriving = {v: frozenset([number]) for number, v in enumerate(cotangents)}
    # For each variable that depends on no cotangent: the ``values`` that it depends on.
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

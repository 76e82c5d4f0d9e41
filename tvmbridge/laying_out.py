"""Laying out: compiled functions return and take what lies in another order in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import tvm

from tvmbridge.layouts import Layout
from tvmbridge.passes.base import storage_roots
from tvmbridge.passes.relax.lay_out import Permuted
from tvmbridge.pipeline import layout_passes, run_passes
from tvmbridge.split import SplitModule
from tvmbridge.types import PassRecord


def lay_out_functions(
    mod: tvm.IRModule,
    parts: SplitModule | None,
    layouts: Mapping[int, Layout],
    records: list[PassRecord],
) -> tuple[tvm.IRModule, SplitModule | None]:
    """The functions with outputs in their order of memory, in which backward takes them too.

    Cotangents arrive in the order of their outputs: most often they lie so.
    """
    moved = {n: Permuted(n, v.order, v.shape) for n, v in layouts.items() if v.moves}
    mod = run_passes(mod, layout_passes("forward", list(moved.values()), ()), records)
    if parts is None:
        return mod, None
    first = len(parts.reads)
    taken = {i: n for i, (n, _) in enumerate(parts.kept_outputs, start=first)}
    first = len(mod["backward"].params) - len(parts.cotangent_of)
    taken |= dict(enumerate(parts.cotangent_of, start=first))
    parameters = [replace(moved[n], number=i) for i, n in taken.items() if n in moved]
    mod = run_passes(mod, layout_passes("backward", (), parameters), records)
    return mod, replace(parts, mod=mod)


def shared_residuals(
    mod: tvm.IRModule, layouts: Mapping[int, Layout], num_outputs: int
) -> frozenset[int]:
    """Outputs that, permuted, are a residual: who writes into one must not change the other."""
    roots = storage_roots(mod["forward"])
    residuals = set(roots[num_outputs:])
    return frozenset(number for number in layouts if roots[number] in residuals)

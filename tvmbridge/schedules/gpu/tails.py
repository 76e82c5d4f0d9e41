"""Reductions with a tail: an elementwise stage that reads each result where it was computed.

For example, the gradient of a bias is summed in float32 and rounded to half precision. In two loop
nests it would be written and read once more, by another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm_ffi

from tvmbridge.schedules.indexing import Indexer, index_var, unravel
from tvmbridge.schedules.kernel import Kernel
from tvmbridge.schedules.plan import Nest
from tvmbridge.schedules.reductions import ReductionNest
from tvmbridge.schedules.rows import RowNest
from tvmbridge.schedules.values import reads


def with_tails(kernel: Kernel, nests: Sequence[Nest]) -> list[Nest]:
    """Return ``nests``, in which each reduction computes the elementwise nest that follows it."""
    found: list[Nest] = []
    for nest in nests:
        last = found[-1] if found else None
        if isinstance(last, ReductionNest) and last.tail is None and isinstance(nest, RowNest):
            others = [n for n in nests if n is not nest]
            if _follows(kernel, last, nest, others):
                found[-1] = replace(last, tail=nest.members[0].stage)
                continue
        found.append(nest)
    return found


def _follows(
    kernel: Kernel, reduction: ReductionNest, nest: RowNest, others: Sequence[Nest]
) -> bool:
    """Whether ``nest`` alone reads the results of ``reduction``, each at its own position."""
    buffer, size = reduction.stage.buffer, reduction.stage.size
    if len(nest.members) > 1 or not nest.is_elementwise or buffer in kernel.outputs:
        return False
    stage, position = nest.members[0].stage, index_var("position")
    if stage.size != size or stage.reduction is not None:
        return False
    indexer = Indexer({position: size})
    at = unravel(position, stage.spatial, indexer)
    found = [
        indexer.simplify(indexer.flat(source, indices))
        for _, source, indices in reads(kernel, nest.stored, indexer, stage, at)
        if source.same_as(buffer)
    ]
    same = size == 1 or all(tvm_ffi.structural_equal(flat, position) for flat in found)
    if not found or not same:
        return False
    return not any(_reads(kernel, other, buffer) for other in others)


def _reads(kernel: Kernel, nest: Nest, buffer: object) -> bool:
    stages = (
        [member.stage for member in nest.members] if isinstance(nest, RowNest) else [nest.stage]
    )
    for stage in stages:
        indexer = Indexer({axis.var: axis.extent for axis in stage.axes})
        at = {axis.var: axis.var for axis in stage.axes}
        found = reads(kernel, nest.stored, indexer, stage, at)
        if any(source.same_as(buffer) for _, source, _ in found):
            return True
    return False

"""Decide which stages of a function are stored, and group them into loop nests."""

from __future__ import annotations

from typing import Any

from tvmbridge.core.decisions import Rule, decided, sizes_vary
from tvmbridge.schedules.down_sums import down_buffers
from tvmbridge.schedules.indexing import split_axes
from tvmbridge.schedules.kernel import Kernel, KernelStage
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reductions import ReductionNest, columns_of
from tvmbridge.schedules.row_choices import smooth_rows
from tvmbridge.schedules.rows import RowNest, row_axes
from tvmbridge.schedules.tiles import TileNest, transposed_axis

Nest = RowNest | ReductionNest | TileNest

# A reduction of few rows is divided along the row if the row has at least this length.
_LONG_ROW = 16384


def stored_stages(kernel: Kernel, machine: Machine) -> list[KernelStage]:
    """Return the stages whose results are stored, in order.

    All other stages are recomputed at each read. Stored are reductions, outputs, and elementwise
    stages that are not cheap and would be computed repeatedly: several stages read them, or a
    larger stage does (a broadcast).
    """
    readers: dict[Any, list[KernelStage]] = {}
    for stage in kernel.stages:
        for buffer in {load.buffer for load in stage.loads}:
            readers.setdefault(buffer, []).append(stage)
    reduces = any(stage.reduction is not None for stage in kernel.stages)
    cheap = machine.cheap if reduces else machine.cheap_without_reductions
    costs: dict[Any, int] = {}
    stored = []
    for stage in kernel.stages:
        inner = sum(costs.get(load.buffer, 0) for load in stage.loads)
        cost = stage.cost + inner
        uses = readers.get(stage.buffer, [])
        dear = cost > cheap and (len(uses) > 1 or _are_repeated(uses, stage))
        if stage.reduction is not None or stage.buffer in kernel.outputs or dear:
            stored.append(stage)
        else:
            costs[stage.buffer] = cost
    return stored


def _are_repeated(uses: list[KernelStage], stage: KernelStage) -> bool:
    """Whether a reader needs elements of ``stage`` more than once, at common sizes."""
    repeated: bool = decided(Rule.MIDDLE, lambda: any(_reads_again(u, stage) for u in uses))
    return repeated


def _reads_again(reader: KernelStage, stage: KernelStage) -> bool:
    """Whether ``reader`` needs elements of ``stage`` more than once.

    A concatenation, which chooses one piece for each position, reads each element once.
    """
    loads = [load for load in reader.loads if load.buffer.same_as(stage.buffer)]
    if reader.reduction is None and all(load.guarded for load in loads):
        return len(loads) > 1
    return reader.size * reader.depth > stage.size


def plan(kernel: Kernel, machine: Machine) -> list[Nest]:
    """Group the stored stages into loop nests; a stage joins the previous one if its rows fit."""
    stages = stored_stages(kernel, machine)
    stored = {stage.buffer for stage in stages}
    downs = down_buffers(kernel, stored, stages, machine)
    # Other stages come first, because they determine the rows that these reductions join.
    stages.sort(key=lambda stage: stage.buffer in downs)
    nests: list[Nest] = []
    for position, stage in enumerate(stages):
        last = nests[-1] if nests else None
        if stage.buffer in downs and isinstance(last, RowNest) and last.add_down(stage):
            continue
        special = _reduction_nest(kernel, stored, stage, machine)
        if special is not None:
            nests.append(special)
            continue
        if nests and _joins(nests[-1], stage, machine):
            continue
        across = transposed_axis(kernel, stored, stage)
        if across is not None:
            nests.append(TileNest(kernel, stored, stage, across))
            continue
        cuts = machine.merges and not sizes_vary()
        rows = _rows_for(kernel, stored, stages[position:], downs, cuts)
        nest = RowNest(kernel, rows, stored, cuts=cuts)
        if not nest.add(stage):
            raise ValueError(f"stage {stage.name} does not fit its own rows")
        nests.append(nest)
    return nests


def _joins(nest: Nest, stage: KernelStage, machine: Machine) -> bool:
    """Add ``stage`` to ``nest`` if its rows fit and all cores have work; return True if added."""
    longest = machine.longest_row
    if not isinstance(nest, RowNest) or longest is None or stage.reduction is not None:
        return nest.add(stage)
    enough = nest.rows >= machine.cores or stage.size <= nest.rows * longest
    if decided(Rule.MIDDLE, lambda: enough):
        return nest.add(stage)
    tried = nest.copy()
    if not tried.add(stage) or not tried.is_elementwise:
        return False
    nest.members = tried.members
    return True


def _reduction_nest(
    kernel: Kernel, stored: set[Any], stage: KernelStage, machine: Machine
) -> ReductionNest | None:
    """Return a separate loop nest for a reduction down columns or along few, long rows, or None."""
    if stage.reduction is None or stage.depth == 0:
        return None
    columns = columns_of(kernel, stored, stage)
    if columns is not None:
        return ReductionNest(kernel, stored, stage, stage.size // columns, columns)
    is_long = stage.size < 4 * machine.cores and stage.depth >= _LONG_ROW
    if decided(Rule.MIDDLE, lambda: is_long):
        return ReductionNest(kernel, stored, stage, stage.size, 1)
    return None


def _rows_for(
    kernel: Kernel, stored: set[Any], stages: list[KernelStage], downs: set[Any], cuts: bool
) -> int:
    """Return the number of rows of the loop nest that begins with the first of ``stages``."""
    first = stages[0]
    if first.reduction is not None:
        return first.size
    following = next((s for s in stages if s.reduction is not None), None)
    if (
        following is not None
        and following.size > 1
        and columns_of(kernel, stored, following) is None
        and row_axes(first, following.size)
    ):
        return following.size
    rows = smooth_rows(kernel, stored, first, within=cuts)
    if rows is None:
        extents = [axis.extent for axis in first.spatial]
        rows = first.size // extents[-1]
    # A reduction over the rows can join only if there are as many rows as it reduces.
    depths = [stage.depth for stage in stages if stage.buffer in downs]
    if depths and rows < depths[0] and split_axes(first.spatial, depths[0]):
        return depths[0]
    return rows


def shared_buffers(kernel: Kernel, nests: list[Nest]) -> set[Any]:
    """Return the buffers that must be in memory: the caller or another loop nest reads them."""
    shared = set(kernel.outputs)
    home = {m.stage.buffer: i for i, nest in enumerate(nests) for m in nest.members}
    for i, nest in enumerate(nests):
        for member in nest.members:
            for buffer in _read_buffers(kernel, nest.stored, member.stage):
                if buffer in home and home[buffer] != i:
                    shared.add(buffer)
    return shared


def _read_buffers(kernel: Kernel, stored: set[Any], stage: KernelStage) -> set[Any]:
    found: set[Any] = set()
    for load in stage.loads:
        producer = None if load.buffer in stored else kernel.producer(load.buffer)
        found |= {load.buffer} if producer is None else _read_buffers(kernel, stored, producer)
    return found

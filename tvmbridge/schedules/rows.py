"""Row-wise loop nests: all stages of a row run while the row is in cache.

The outer loop runs over rows. For each row there are passes over the columns: vector loops, in
which a reduction keeps one partial result per lane. Between passes, the scalars of the row are
computed. Softmax or layer normalisation, with the stages around it, is one loop nest with three
passes. A chain of elementwise stages is a loop nest with one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm_ffi
from tvm.ir import Expr
from tvm.tirx import Stmt

from tvmbridge.schedules.indexing import Indexer, cut_axes, index_var, integer, split_axes, unravel
from tvmbridge.schedules.kernel import Kernel, KernelStage
from tvmbridge.schedules.reader import Axis, Buffer, substitute, variables
from tvmbridge.schedules.values import reads

SplitAxes = tuple[Sequence[Axis], Sequence[Axis]]


@dataclass
class Member:
    """A stage in a row-wise loop nest.

    - ``stage``: the stage.
    - ``columns``: the number of positions of a row.
    - ``time``: when it runs within a row: even times are passes over the columns, odd times are
      scalars between passes.
    - ``axes``: the stage's axes of rows, and its axes of columns.
    - ``kept``: whether the value needs memory, because it is read after its pass or from another
      column.
    - ``crossed``: whether the value is read from another column.
    - ``down``: whether the stage is a reduction over the rows, complete only after all rows.
    - ``cut``: if rows end inside an axis, the value of that axis in terms of its two parts.
    """

    stage: KernelStage
    columns: int
    time: int
    axes: SplitAxes
    kept: bool = False
    crossed: bool = False
    down: bool = False
    cut: Mapping[Any, Expr] = field(default_factory=dict)

    @property
    def along(self) -> bool:
        """Whether the stage reduces each row to one value."""
        return self.stage.reduction is not None and not self.down

    @property
    def scalar(self) -> bool:
        """Whether the stage has one value for each row."""
        return self.columns == 1 or self.along

    @property
    def looped(self) -> bool:
        """Whether the stage runs in a pass over columns."""
        return self.stage.reduction is not None or self.columns > 1

    @property
    def ready(self) -> int:
        """The first time at which the result can be read."""
        return self.time + 1 if self.along else self.time


@dataclass
class RowNest:
    """Stages that share a loop over rows; :meth:`add` adds another stage if it fits.

    - ``kernel``: the function of the stages.
    - ``rows``: the number of rows.
    - ``stored``: the buffers whose results are stored.
    - ``members``: the stages, in the order in which they were added.
    - ``cuts``: whether rows may end inside an axis.
    """

    kernel: Kernel
    rows: int
    stored: set[Any]
    members: list[Member] = field(default_factory=list)
    cuts: bool = False

    def __post_init__(self) -> None:
        self.row, self.column = index_var("row"), index_var("column")

    @property
    def is_elementwise(self) -> bool:
        """Whether the loop nest is purely elementwise: no element depends on another position."""
        members = self.members
        return all(
            m.looped
            and m.stage.reduction is None
            and not m.kept
            and m.columns == members[0].columns
            for m in members
        ) or all(m.columns == 1 and not m.looped and not m.crossed for m in members)

    def copy(self) -> RowNest:
        """Return a copy, to which stages can be added without changing this loop nest."""
        members = [replace(m) for m in self.members]
        return RowNest(self.kernel, self.rows, self.stored, members, self.cuts)

    def in_passes(
        self,
        scalar: Callable[[Member], list[Stmt]],
        columns: Callable[[list[Member]], list[Stmt]],
        end: Callable[[list[Member]], list[Stmt]] = lambda members: [],
    ) -> list[Stmt]:
        """Return the statements of all passes over a row, and of the scalars between them.

        Args:
            scalar: returns the statements of a scalar.
            columns: returns the loop of members with equal widths.
            end: returns what follows the loops of a pass with these members.
        """
        statements: list[Stmt] = []
        for time in sorted({member.time for member in self.members}):
            members = [m for m in self.members if m.time == time]
            if time % 2:
                statements += (s for member in members for s in scalar(member))
                continue
            for width in dict.fromkeys(m.columns for m in members):
                statements += columns([m for m in members if m.columns == width])
            statements += end(members)
        return statements

    def member(self, buffer: Buffer) -> Member | None:
        """Return the member that computes ``buffer``."""
        return next((m for m in self.members if m.stage.buffer.same_as(buffer)), None)

    def add(self, stage: KernelStage) -> bool:
        """Add ``stage`` if its rows read only the same rows of members; return True if added."""
        axes = row_axes(stage, self.rows)
        if axes is None and self.cuts and stage.reduction is None:
            parts = cut_axes(stage.spatial, self.rows)
            return parts is not None and self._add(stage, parts[:2], down=False, cut=parts[2])
        return self._add(stage, axes, down=False)

    def add_down(self, stage: KernelStage) -> bool:
        """Add a reduction over the rows, under the same condition; return whether it was added."""
        axes = split_axes((*stage.reduced, *stage.spatial), self.rows)
        if axes is None or any(axis.reduce for axis in axes[1]):
            return False
        return self._add(stage, axes, down=True)

    def _add(
        self,
        stage: KernelStage,
        axes: SplitAxes | None,
        *,
        down: bool,
        cut: Mapping[Any, Expr] | None = None,
    ) -> bool:
        if axes is None:
            return False
        columns = extent_of(axes[1])
        joined = Member(stage, columns, -1, axes, down=down, cut=cut or {})
        joined.time = 0 if joined.looped else -1
        indexer = Indexer({self.row: self.rows, self.column: columns})
        at = element_at(joined, self.row, self.column, indexer)
        sources = []
        for _, buffer, indices in reads(self.kernel, self.stored, indexer, stage, at):
            source = self.member(buffer)
            if source is None:
                continue
            if source.down:
                return False
            width = 1 if source.scalar else source.columns
            flat = indexer.flat(buffer, indices) - self.row * integer(width)
            within = indexer.simplify(flat)
            if not variables(within) <= {self.column}:
                return False
            if not (indexer.lies_in(within, width) or self._same_row(source, indices, indexer)):
                return False
            same = source.columns == columns and tvm_ffi.structural_equal(within, self.column)
            joined.time = max(joined.time, _earliest(source, joined.looped, same))
            sources.append((source, same))
        while any(_shares_pass(m, joined) and m.columns != columns for m in self.members):
            joined.time += 2
        for source, same in sources:
            source.kept |= not source.scalar and (not same or joined.time > source.time)
            source.crossed |= not source.scalar and not same
        self.members.append(joined)
        return True

    def _same_row(self, source: Member, indices: Sequence[Expr], indexer: Indexer) -> bool:
        """Whether a read is always in the row that is computed, by its row indices.

        The offset from the start of the row cannot show this for a guarded read: an offset of -1
        would be the end of the previous row.
        """
        if source.cut:
            return False
        row: Expr = integer(0)
        for index, axis in zip(indices, source.axes[0], strict=False):
            row = row * integer(axis.extent) + index
        return tvm_ffi.structural_equal(indexer.simplify(row), indexer.simplify(self.row))


def _shares_pass(member: Member, other: Member) -> bool:
    """Whether two stages run in the same loop over columns, and so need equal widths."""
    return member.looped and other.looped and member.time == other.time


def _earliest(source: Member, looped: bool, same: bool) -> int:
    """Return the first time at which a stage that reads ``source`` can run.

    Args:
        looped: whether the reading stage runs in a pass over columns.
        same: whether it reads only its own column.
    """
    if source.scalar:
        return source.ready + 1 if looped else source.ready
    if not looped:
        return source.time + 1
    return source.time if same else source.time + 2


def extent_of(axes: Sequence[Axis]) -> int:
    """Return the number of positions over ``axes``."""
    count = 1
    for axis in axes:
        count *= axis.extent
    return count


def row_axes(stage: KernelStage, rows: int) -> SplitAxes | None:
    """Split axes into row axes of ``rows`` elements and columns, with all reduced axes; or None."""
    if stage.reduction is not None:
        return (stage.spatial, stage.reduced) if stage.size == rows else None
    return split_axes(stage.spatial, rows)


def element_at(member: Member, row: Expr, column: Expr, indexer: Indexer) -> dict[Any, Expr]:
    """Return the values of the axes of a member's stage at a row and column."""
    rows, columns = member.axes
    at = unravel(row, rows, indexer) | unravel(column, columns, indexer)
    return at | {v: indexer.simplify(substitute(e, at)) for v, e in member.cut.items()}

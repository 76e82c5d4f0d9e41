"""The stages of a module's way: the graph after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm

from tvmbridge.compiler.lowering import LoweredModule
from tvmbridge.core.types import PassRecord


@dataclass(frozen=True)
class Stage:
    """A stage of the way: its name, the group it belongs to, and its module.

    ``mod`` is None for a captured program. ``changed`` is False for a pass that left its module as
    it was: it need not be evaluated again.
    """

    name: str
    group: str
    mod: tvm.IRModule | None
    changed: bool = True


def stages_of(
    lowered: LoweredModule, seen: Sequence[tuple[PassRecord, tvm.IRModule, tvm.IRModule]]
) -> Iterator[Stage]:
    """The imported module, the module after each pass, and the split."""
    yield Stage("imported", "imported", seen[0][1] if seen else lowered.mod)
    counts: dict[str, int] = {}
    last = seen[0][1] if seen else None
    for record, before, after in seen:
        if last is not None and not before.same_as(last):
            yield Stage("joint function", "passes", before)
        counts[record.name] = counts.get(record.name, 0) + 1
        name = record.name if counts[record.name] == 1 else f"{record.name} {counts[record.name]}"
        yield Stage(name, "passes", after, record.changed)
        last = after
    if lowered.split is not None:
        yield Stage("split", "passes", lowered.mod)

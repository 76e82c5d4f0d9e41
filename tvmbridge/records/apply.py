"""Apply tuning records to a module's functions, before the rules schedule the other functions."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx

from tvmbridge.records.library import Library
from tvmbridge.records.tasks import Task, count_calls
from tvmbridge.schedules import is_scheduled


@dataclass(frozen=True)
class Coverage:
    """Counts of the kernel calls in compiled code, by the origin of the kernel.

    - ``tuned``: calls of kernels scheduled by a tuning record.
    - ``by_rule``: calls of kernels scheduled by the rules of tvmbridge.
    - ``plain``: calls of kernels with TVM's default loops, because no rule fits them.
    - ``external``: calls of PyTorch's kernels.
    - ``untuned``: calls of TVM's kernels that nobody has tuned for this target yet; 0 if records
      are not used.
    """

    tuned: int = 0
    by_rule: int = 0
    plain: int = 0
    external: int = 0
    untuned: int = 0

    @property
    def calls(self) -> int:
        """The number of all kernel calls."""
        return self.tuned + self.by_rule + self.plain + self.external

    def __str__(self) -> str:
        text = f"{self.tuned} tuned, {self.by_rule} by rule, {self.external} external"
        return text + (f", {self.plain} plain" if self.plain else "")


@dataclass(frozen=True)
class Applied:
    """A module after tuning records were applied.

    - ``mod``: the module.
    - ``tuned``: the names of the functions that a record scheduled.
    - ``missing``: tasks that nobody has tuned, with their numbers of calls.
    """

    mod: tvm.IRModule
    tuned: frozenset[str]
    missing: dict[Task, int]


def apply_records(mod: tvm.IRModule, library: Library) -> Applied:
    """Schedule the functions of ``mod`` for which ``library`` has a record to apply."""
    calls = count_calls(mod)
    functions = dict(mod.functions_items())
    tuned: set[str] = set()
    missing: dict[Task, int] = {}
    for name, function in mod.functions_items():
        if not isinstance(function, tirx.PrimFunc) or is_scheduled(function):
            continue
        task = Task.of(function)
        scheduled = library.schedule(task)
        if scheduled is not None:
            functions[name] = _in_place_of(function, scheduled)
            tuned.add(name.name_hint)
        elif not library.knows(task):
            missing[task] = missing.get(task, 0) + max(1, calls[name.name_hint])
    return Applied(tvm.IRModule(functions, attrs=mod.attrs), frozenset(tuned), missing)


def _in_place_of(function: tirx.PrimFunc, scheduled: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``scheduled`` with the attributes of ``function``, its name included."""
    scheduled = scheduled.without_attr("global_symbol")
    for name, value in dict(function.attrs or {}).items():
        scheduled = scheduled.with_attr(name, value)
    return scheduled


def coverage_of(mod: tvm.IRModule, tuned: frozenset[str]) -> Coverage:
    """Count the kernel calls of a scheduled module; ``tuned`` names the functions with records."""
    by_rule = {
        name.name_hint
        for name, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and is_scheduled(function)
    } - tuned
    counts = {"tuned": 0, "by_rule": 0, "plain": 0, "external": 0}
    for name, number in count_calls(mod).items():
        if not name:
            counts["external"] += number
        elif name in tuned:
            counts["tuned"] += number
        else:
            counts["by_rule" if name in by_rule else "plain"] += number
    return Coverage(**counts)

"""The tuned schedules of a module's functions, before the rules schedule the others."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx

from tvmbridge.records.library import Library
from tvmbridge.records.tasks import Task, count_calls
from tvmbridge.schedules import is_scheduled


@dataclass(frozen=True)
class Coverage:
    """The calls in compiled code by where the kernel comes from.

    Args:
        tuned: scheduled by a tuning record.
        by_rule: scheduled by the rules of tvmbridge.
        plain: loops as TVM makes them, since no rule knows the form.
        external: PyTorch's kernels.
        untuned: those of TVM's that nobody has tuned for this target yet, where records are used.
    """

    tuned: int = 0
    by_rule: int = 0
    plain: int = 0
    external: int = 0
    untuned: int = 0

    def __str__(self) -> str:
        text = f"{self.tuned} tuned, {self.by_rule} by rule, {self.external} external"
        return text + (f", {self.plain} plain" if self.plain else "")


@dataclass(frozen=True)
class Applied:
    """A module with tuned functions, their names, and the tasks nobody has tuned, with weights."""

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
    """``scheduled`` with the name and the other attributes of ``function``."""
    scheduled = scheduled.without_attr("global_symbol")
    for name, value in dict(function.attrs or {}).items():
        scheduled = scheduled.with_attr(name, value)
    return scheduled


def coverage_of(mod: tvm.IRModule, tuned: frozenset[str]) -> Coverage:
    """Count the calls of a scheduled module."""
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

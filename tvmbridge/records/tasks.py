"""Tuning tasks: the fused functions of a module, without duplicates."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import meta_schedule as ms

from tvmbridge.records.allowed import RefusedRecordError
from tvmbridge.records.workloads import LENGTH, checked_workload
from tvmbridge.schedules import is_scheduled

_KEPT_ATTRIBUTES = ("tirx.noalias", "s_tir")


@dataclass(frozen=True, eq=False)
class Task:
    """One function to be scheduled.

    Two tasks are equal if their functions are structurally equal: names do not matter.

    - ``mod``: a module with this function alone, under the name ``main``.
    """

    mod: tvm.IRModule

    @staticmethod
    def of(function: tirx.PrimFunc) -> Task:
        """Return the task of a function, without the attributes that depend on its module."""
        for name in list(function.attrs.keys() if function.attrs else ()):
            if name not in _KEPT_ATTRIBUTES:
                function = function.without_attr(name)
        return Task(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}))

    @cached_property
    def hash(self) -> int:
        """TVM's structural hash, which may differ on another machine."""
        return int(tvm_ffi.structural_hash(self.mod))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Task)
            and self.hash == other.hash
            and bool(tvm_ffi.structural_equal(self.mod, other.mod))
        )

    @cached_property
    def workload(self) -> list[str]:
        """MetaSchedule's JSON of the function (hash and encoded text), without white space."""
        structural, encoded = ms.database.Workload(self.mod).as_json()
        # TVM's encoding: the length in eight bytes, then indented JSON.
        graph = json.loads(base64.b64decode(encoded)[LENGTH.size :])
        dense = json.dumps(graph, separators=(",", ":")).encode()
        stream = LENGTH.pack(len(dense)) + dense
        return [str(structural), base64.b64encode(stream).decode()]

    @cached_property
    def refusal(self) -> str | None:
        """Why readers would refuse the function in a file; None if it can be stored."""
        try:
            checked_workload(self.workload[1])
        except RefusedRecordError as error:
            return str(error)
        return None

    @property
    def key(self) -> str:
        """The name of the task in files: a digest of its JSON."""
        return workload_key(self.workload)

    @cached_property
    def blocks(self) -> list[str]:
        """The names of the function's blocks, in order."""
        names: list[str] = []
        tvm_ffi.structural_walk(
            self.mod["main"].body, (tvm.s_tir.SBlock, lambda block: names.append(block.name_hint))
        )
        return [name.removeprefix("T_") for name in names if name != "root"]

    @property
    def size(self) -> int:
        """The number of blocks, which measures how much there is to schedule."""
        return len(self.blocks)

    @property
    def elements(self) -> int:
        """The number of elements of the largest parameter."""
        shapes = (shape_of(param) for param in self.mod["main"].params)
        return max((prod(_extent(d) for d in shape) for shape in shapes), default=1)

    @property
    def label(self) -> str:
        """A short description for people: the blocks, and the shape of the last parameter."""
        names = self.blocks
        shown = names if len(names) <= 4 else [*names[:2], "...", *names[-2:]]
        shape = "x".join(str(_extent(d)) for d in shape_of(self.mod["main"].params[-1]))
        return f"{' '.join(shown)} {shape}"


def _extent(dimension: Any) -> int:
    return int(dimension) if isinstance(dimension, tirx.IntImm) else 1


def shape_of(param: Any) -> list[Any]:
    """Return the shape of a function's parameter; an empty list for a number."""
    return list(param.shape) if tirx.is_buffer_var(param) else []


def workload_key(workload: list[str]) -> str:
    """Return a digest of a workload's encoded JSON, by which files name the task."""
    return hashlib.sha256(workload[1].encode()).hexdigest()[:16]


@lru_cache(maxsize=4096)
def parse_workload(encoded: str) -> Task:
    """Return the task of a workload's encoded text, the second item of MetaSchedule's JSON.

    Raises:
        RefusedRecordError: the text is not allowed (:mod:`tvmbridge.records.workloads`).
        Exception: TVM cannot load the text; TVM raises no narrower class.
    """
    task = Task(tvm.ir.load_json(checked_workload(encoded)))
    if [name.name_hint for name in task.mod.get_global_vars()] != ["main"]:
        raise RefusedRecordError("it is not one function, main")
    return task


def count_tasks(mod: tvm.IRModule) -> dict[Task, int]:
    """Return the tasks of a module of fused functions, with the number of calls of each."""
    calls = count_calls(mod)
    tasks: Counter[Task] = Counter()
    for name, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and not is_scheduled(function):
            tasks[Task.of(function)] += max(1, calls[name.name_hint])
    return dict(tasks)


def count_calls(mod: tvm.IRModule) -> Counter[str]:
    """Count the calls of each TIR function; calls of external kernels count under ""."""
    calls: Counter[str] = Counter()
    for value in _calls(mod):
        name = getattr(value.op, "name", "")
        if name in ("relax.call_tir", "relax.call_tir_inplace"):
            calls[value.args[0].name_hint] += 1
        elif name in ("relax.call_pure_packed", "relax.call_dps_packed"):
            calls[""] += 1
    return calls


def _calls(mod: tvm.IRModule) -> Iterable[relax.Call]:
    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            for block in function.body.blocks:
                yield from (b.value for b in block.bindings if isinstance(b.value, relax.Call))

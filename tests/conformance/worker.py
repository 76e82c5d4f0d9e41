"""The worker process: reads tasks as JSON lines, writes outcomes as JSON lines.

The worker writes a line ``{"group": [labels]}`` before each group, and ``{"eager": label}`` before
eager PyTorch alone runs a case. From these lines the parent knows which cases a worker that died
was running.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import torch

import tests.planted.plugin  # noqa: F401  (plants a mistake, if one is asked for)
from tests.conformance.accuracy import AccuracyCheck
from tests.conformance.case import Case
from tests.conformance.check import Check, GroupFailed, Outcome
from tests.conformance.coverage import UNDEFINED_VALUES, chooses, every_operator, is_local
from tests.conformance.dynamic import DynamicCheck, dynamic_cases
from tests.conformance.samples import accuracy_cases, cases_of, special_cases
from tests.conformance.special import SpecialCheck


def _groups(cases: Sequence[Case], size: int) -> Iterable[list[Case]]:
    """Yield groups of at most ``size`` cases; cases with an empty tensor have their own groups."""
    for ordinary in (True, False):
        kind = [case for case in cases if case.ordinary is ordinary]
        for start in range(0, len(kind), size):
            yield kind[start : start + size]


def _outcomes(
    check: Check | SpecialCheck, group: list[Case], announce: Callable[[Sequence[Case]], None]
) -> Iterable[Outcome]:
    announce(group)
    try:
        yield from check.group(group)
        return
    except GroupFailed:
        pass
    for case in group:
        announce([case])
        yield from check.group([case])


def _check_of(task: dict[str, Any]) -> Check | SpecialCheck:
    name, joint = task["name"], task["mode"] if task["mode"] != "forward" else None
    info = every_operator()[name]
    operator = info.op
    if task["special"]:
        dtype = getattr(torch, task["dtype"])
        return SpecialCheck(operator, dtype, is_local(info), not chooses(info), joint)
    if task["accuracy"]:
        return AccuracyCheck(operator, joint=joint)
    values = name.split(":")[0] not in UNDEFINED_VALUES
    if task["dynamic"]:
        return DynamicCheck(operator, joint=joint, values=values)
    return Check(operator, joint=joint, values=values, admit=task["admit"])


def _chooser(task: dict[str, Any]) -> Callable[..., list[Case]]:
    """Return the function that returns the cases of a task."""
    kinds = {"special": special_cases, "accuracy": accuracy_cases, "dynamic": dynamic_cases}
    return next((make for kind, make in kinds.items() if task[kind]), cases_of)


def _run_task(task: dict[str, Any], out: TextIO) -> None:
    def write(content: dict[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")
        out.flush()

    def announce(group: Sequence[Case]) -> None:
        write({"group": [case.label for case in group]})

    name, dtype = task["name"], getattr(torch, task["dtype"])
    gradient = task["mode"] != "forward"
    check = _check_of(task)
    wanted = task["labels"]
    write({"group": []})
    cases = _chooser(task)(name, dtype, task["limit"], gradient=gradient)
    asked = [c for c in cases if wanted is None or c.label in wanted]
    cases = []
    for case in asked:
        if case.label not in task["left_out"]:
            write({"eager": case.label})
            cases += [case] if check.accepts(case) else []
    write({"cases": [case.label for case in cases]})
    for group in _groups(cases, task["group_size"]):
        for outcome in _outcomes(check, group, announce):
            write({"outcome": asdict(outcome)})
    write({"done": True})


def main() -> None:
    """Read tasks from stdin and run them, until stdin ends."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # Other output must not mix with the lines of the protocol.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        _run_task(json.loads(line), out)


if __name__ == "__main__":
    main()

"""Scripts: small programs as users write them, run in eager PyTorch and on compiled code.

A script is a generator function of a :class:`Door`. It opens its modules by the door, and yields
the results of each step: losses, outputs, attributes, gradients.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tvmbridge import (
    CompileReport,
    DispatchReport,
    add_tvm_dispatch,
    compile_report,
    dispatch_report,
)

DOORS = ("dispatch", "compile")
WARM_UP = 3  # steps whose calls may run in eager PyTorch


class Door:
    """The way from a script's modules to compiled code: ``"eager"``, or one of ``DOORS``.

    - ``reports``: functions that return the reports so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reports: list[Callable[[], DispatchReport | CompileReport]] = []
        if name == "compile":
            torch.compiler.reset()
            self.reports.append(compile_report)

    def __call__(self, model: Any, **options: Any) -> Any:
        """Return ``model``, or a wrapper of it, so that it runs on compiled code."""
        if self.name == "dispatch":
            add_tvm_dispatch(model, **options)
            self.reports.append(lambda: dispatch_report(model))
        if self.name == "compile":
            for method in options.get("methods", ()):
                compiled = torch.compile(getattr(model, method), backend="tvmbridge")
                nn.Module.__setattr__(model, method, compiled)
            if "methods" not in options and type(model).__module__.startswith("torch.nn."):
                # Compiled in place, a module of PyTorch's own runs as before.
                return torch.compile(model, backend="tvmbridge")
            if "methods" not in options:
                model.compile(backend="tvmbridge")
        return model


Main = Callable[[Door], Iterator[list[Any]]]


@dataclass(frozen=True)
class Script:
    """A script with what it is held to.

    - ``needs``: the libraries that it imports.
    - ``bound``: the largest relative difference from eager PyTorch.
    - ``doors``: the doors that it takes.
    - ``least``: the least share of the calls after the third step that compiled code serves.
    - ``compiled``: the same for the graphs of torch.compile; None: ``least``.
    """

    name: str
    main: Main
    needs: tuple[str, ...] = ()
    bound: float = 2e-5
    doors: tuple[str, ...] = DOORS
    least: float = 0.95
    compiled: float | None = None

    def least_of(self, door: str) -> float:
        """Return the least share of the calls through ``door``."""
        return self.least if door != "compile" or self.compiled is None else self.compiled


SCRIPTS: dict[str, Script] = {}


def script(*needs: str, **facts: Any) -> Callable[[Main], Main]:
    """Enter a function into the table of scripts, under its name."""

    def entered(main: Main) -> Main:
        name = getattr(main, "__name__", "").strip("_")
        SCRIPTS[name] = Script(name, main, needs, **facts)
        return main

    return entered


@dataclass
class Found:
    """What became of one script through one door.

    - ``served``, ``calls``: calls after the third step that compiled code served, and all of them.
      A library's loop makes all calls before the first step: then every call counts.
    - ``compiled``: the number of compilations.
    - ``difference``: the largest relative difference from eager PyTorch.
    - ``error``: the error that the script raised; empty: none.
    """

    served: int = 0
    calls: int = 0
    compiled: int = 0
    difference: float = 0.0
    seconds: float = 0.0
    error: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.served / max(1, self.calls)

    def right(self, script: Script) -> bool:
        return not self.error and self.difference <= script.bound


def missing(script: Script) -> str:
    """Return why a library that the script needs cannot be imported; empty if all can."""
    for library in script.needs:
        try:
            importlib.import_module(library)
        except Exception as error:  # builds that do not fit together raise any exception
            return f"{library}: {error}"
    return ""


def run(script: Script, door: str) -> Found:
    """Run ``script`` in eager PyTorch and through ``door``."""
    expected = [_kept(results) for results in _started(script, Door("eager"))]
    found, opened, begun = Found(), Door(door), time.monotonic()
    before, steps = (0, 0), 0
    try:
        for step, results in enumerate(_started(script, opened)):
            found.difference = max(found.difference, _difference(_kept(results), expected[step]))
            steps += 1
            if steps == WARM_UP:
                before = _counts(opened)
    except Exception as error:
        found.error = f"step {steps}: {type(error).__name__}: {error}"[:600]
    if steps != len(expected) and not found.error:
        found.error = f"{steps} steps, in eager PyTorch {len(expected)}"
    served, eager = _counts(opened)
    if before == (served, eager):
        before = (0, 0)
    found.served = served - before[0]
    found.calls = found.served + eager - before[1]
    found.reasons = [line for report in opened.reports for line in _reasons(report())]
    found.compiled = sum(_compiled(report()) for report in opened.reports)
    found.seconds = time.monotonic() - begun
    return found


def _started(script: Script, door: Door) -> Iterator[list[Any]]:
    torch.manual_seed(0)
    return script.main(door)


def _kept(results: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [torch.as_tensor(leaf).detach().clone() for leaf in leaves if leaf is not None]


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in expected]:
        return float("inf")
    return max(map(_relative, found, expected), default=0.0)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.is_nested:
        return max(map(_relative, found.unbind(), expected.unbind()))
    wide = torch.complex128 if found.is_complex() else torch.float64
    a, b = found.to_dense().to(wide), expected.to_dense().to(wide)
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), a - b).abs().max()
    return float(difference / b.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e-3))


def _counts(door: Door) -> tuple[int, int]:
    pairs = [_calls(report()) for report in door.reports]
    return sum(p[0] for p in pairs), sum(p[1] for p in pairs)


def _calls(report: DispatchReport | CompileReport) -> tuple[int, int]:
    if isinstance(report, DispatchReport):
        return report.tvm_calls, sum(report.fallbacks.values())
    return report.calls


def _reasons(report: DispatchReport | CompileReport) -> list[str]:
    if isinstance(report, DispatchReport):
        cut = [f"cut: {report.cut}"] if report.cut else []
        fallen = [
            f"{count} calls: {why} ({report.examples.get(why, '')}) -> {report.reasons[why].advice}"
            for why, count in report.fallbacks.items()
        ]
        return cut + fallen
    lines = [f"{n} breaks: {why}" for why, n in report.breaks.items()]
    lines.append(f"{report.limited_calls} calls past the limit of graphs: {report.limited}")
    return lines + [f"{n} calls: {why}" for g in report.graphs for why, n in g.eager_calls.items()]


def _compiled(report: DispatchReport | CompileReport) -> int:
    if isinstance(report, DispatchReport):
        return len(report.specializations)
    return sum(len(d.specializations) for g in report.graphs for d in g.dispatches)

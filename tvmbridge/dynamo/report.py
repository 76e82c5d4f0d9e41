"""What became of the graphs that torch.compile has handed to tvmbridge."""

from __future__ import annotations

import io
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvmbridge.core.torch_private import graph_breaks
from tvmbridge.dynamo.calls import CompiledGraph, EagerGraph
from tvmbridge.report import DispatchReport, report_of
from tvmbridge.runtime.fallbacks import share

_graphs: weakref.WeakValueDictionary[int, CompiledGraph | EagerGraph]
_graphs = weakref.WeakValueDictionary()
_numbers = itertools.count()
_breaks_before: Counter[str] = Counter()


def keep(called: CompiledGraph | EagerGraph) -> Callable[..., Any]:
    """What Dynamo calls of ``called``, of which the report tells as long as Dynamo keeps that."""
    _graphs[next(_numbers)] = called
    return called.call


def forget() -> None:
    """Begin anew: Dynamo forgets all graphs."""
    _graphs.clear()
    _breaks_before.clear()
    _breaks_before.update(graph_breaks())


@dataclass(frozen=True)
class GraphReport:
    """One graph: the class of the outermost module that it comes from, and how many operators.

    ``calls`` are those that compiled code served, ``eager_calls`` those that PyTorch did, by the
    reason. ``dispatches`` tell of the code: one for each choice of parameters.
    """

    name: str
    operators: int
    calls: int
    eager_calls: Mapping[str, int]
    dispatches: tuple[DispatchReport, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether compiled code has served every call."""
        return not self.eager_calls


@dataclass(frozen=True)
class CompileReport:
    """The graphs of this process since ``torch.compiler.reset()``.

    ``breaks`` counts, by the reason, where Dynamo could not capture a function as one graph; they
    are those of all backends.
    """

    graphs: tuple[GraphReport, ...]
    breaks: Mapping[str, int]

    @property
    def whole(self) -> bool:
        """Whether there are graphs, nothing broke one, and compiled code has served every call."""
        if self.breaks or not self.graphs:
            return False
        return all(graph.whole for graph in self.graphs)

    @property
    def share(self) -> float:
        """The share of the calls of graphs that compiled code served; 0 where there were none."""
        eager = sum(sum(graph.eager_calls.values()) for graph in self.graphs)
        return share(sum(graph.calls for graph in self.graphs), eager)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(file=io.StringIO(), force_terminal=False, force_jupyter=False, width=110)
        breaks = sum(self.breaks.values())
        called = any(graph.calls or graph.eager_calls for graph in self.graphs)
        served = f"{self.share:.0%}" if called else "none was called yet"
        console.print(
            f"graphs: {len(self.graphs)}, graph breaks: {breaks}, calls of graphs served by TVM: "
            f"{served}",
            highlight=False,
        )
        table = Table("graph", "operators", "by TVM", "by PyTorch", "because")
        for graph in self.graphs:
            reasons = "\n".join(graph.eager_calls)
            eager = sum(graph.eager_calls.values())
            row = graph.name, graph.operators, graph.calls, eager, escape(reasons)
            table.add_row(*map(str, row))
        console.print(table)
        for reason, count in self.breaks.items():
            console.print(f"graph breaks: {count}, because {escape(reason)}", highlight=False)
        file = console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()


def compile_report() -> CompileReport:
    """What became of the graphs that torch.compile has handed to tvmbridge so far.

    Graphs that Dynamo has dropped with the function that they come from are not in it.
    """
    breaks = graph_breaks()
    breaks.subtract(_breaks_before)
    return CompileReport(
        graphs=tuple(graph_report(called) for _, called in sorted(_graphs.items())),
        breaks={reason: count for reason, count in breaks.items() if count > 0},
    )


def graph_report(called: CompiledGraph | EagerGraph) -> GraphReport:
    """What became of one graph."""
    if isinstance(called, EagerGraph):
        eager = {called.reason: called.calls}
        return GraphReport(called.name, called.operators, 0, eager)
    reports = tuple(report_of(dispatcher) for dispatcher in called.dispatchers)
    fallbacks: Counter[str] = Counter()
    for report in reports:
        fallbacks.update(report.fallbacks)
    return GraphReport(
        called.graph.name,
        called.graph.operators,
        sum(report.tvm_calls for report in reports),
        dict(fallbacks),
        reports,
    )

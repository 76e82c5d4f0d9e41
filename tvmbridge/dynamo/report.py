"""Report how the graphs that ``torch.compile`` passed to tvmbridge have run."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvmbridge.core.text_console import text_console
from tvmbridge.core.torch_private import graph_break_hint, graph_breaks
from tvmbridge.dynamo.calls import CompiledGraph, EagerGraph
from tvmbridge.dynamo.limit import past_limit, stop_watching, watch_limit
from tvmbridge.report import DispatchReport, report_of
from tvmbridge.runtime.fallbacks import share, worst

_graphs: weakref.WeakValueDictionary[int, CompiledGraph | EagerGraph]
_graphs = weakref.WeakValueDictionary()
_numbers = itertools.count()
_breaks_before: Counter[str] = Counter()
# Whether tvmbridge was used since ``torch.compiler.reset()``, which calls ``forget`` only then.
_in_use = False


def begin() -> None:
    """Leave out graph breaks of other backends that came before the first use of tvmbridge."""
    global _in_use
    if not _in_use:
        forget()
        _in_use = True


def keep(called: CompiledGraph | EagerGraph) -> Callable[..., Any]:
    """Return the function of ``called`` for Dynamo, and include ``called`` in the report.

    The report has ``called`` as long as Dynamo keeps the function.
    """
    global _in_use
    _in_use = True
    _graphs[next(_numbers)] = called
    watch_limit()
    return called.call


def forget() -> None:
    """Start an empty report; ``torch.compiler.reset()`` calls this as it drops all graphs."""
    global _in_use
    _in_use = False
    _graphs.clear()
    stop_watching()
    _breaks_before.clear()
    _breaks_before.update(graph_breaks())


@dataclass(frozen=True)
class GraphReport:
    """The calls of one graph.

    - ``name``: the class of the module, or the function, that the graph was captured from.
    - ``operators``: the number of its operators.
    - ``calls``: the number of calls that compiled code served.
    - ``eager_calls``: the number of calls that eager PyTorch served, by the reason.
    - ``dispatches``: one report of compiled code for each set of parameters.
    - ``small``: whether it has too few operators for compiled code to pay.
    """

    name: str
    operators: int
    calls: int
    eager_calls: Mapping[str, int]
    dispatches: tuple[DispatchReport, ...] = ()
    small: bool = False

    @property
    def whole(self) -> bool:
        """Whether compiled code has served every call."""
        return not self.eager_calls

    @property
    def timed_calls(self) -> int:
        """The number of calls that eager PyTorch served to be timed; none is an eager call."""
        return sum(report.timed_calls for report in self.dispatches)

    @property
    def aside_calls(self) -> int:
        """The number of calls that eager PyTorch served because it was faster."""
        return sum(report.aside_calls for report in self.dispatches)

    @property
    def advice(self) -> str | None:
        """Advice about the most frequent reason of eager calls; None if there is none."""
        reasons = {text: r for report in self.dispatches for text, r in report.reasons.items()}
        text = worst(self.eager_calls, reasons)
        return None if text is None else reasons[text].advice


_NO_GRAPH = (
    "TorchDynamo has given no graph to this backend: has the compiled module been called? "
    "module.compile() has no effect if the module's forward is PyTorch's own, as that of "
    'nn.Sequential is; call torch.compile(module, backend="tvmbridge") instead'
)

# Advice on breaks for which TorchDynamo's own hint leads to another fallback.
_ADVICE = {
    "Module-level backwards hooks require compiled autograd.": (
        "remove the hooks of backward, or call add_tvm_dispatch on the submodules that have them"
    ),
}

_LIMIT_ADVICE = (
    "raise torch._dynamo.config.recompile_limit before the first call, or call "
    "add_tvm_dispatch(module), which has no such limit; TORCH_LOGS=recompiles prints what changes"
)


@dataclass(frozen=True)
class CompileReport:
    """The graphs of this process since ``torch.compiler.reset()``.

    - ``graphs``: a report of each graph that tvmbridge got.
    - ``breaks``: the number of Dynamo's graph breaks since the first :func:`tvmbridge.compile`, by
      the reason, for all backends together.
    - ``limited_calls``: the number of calls that Dynamo ran in eager PyTorch, because functions had
      as many graphs as ``torch._dynamo.config.recompile_limit`` allows; for all backends together.
    - ``limited``: the functions with that many graphs, or the classes of their modules.
    """

    graphs: tuple[GraphReport, ...]
    breaks: Mapping[str, int]
    limited_calls: int = 0
    limited: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether there are graphs, without graph breaks, and compiled code served every call."""
        if self.breaks or self.limited_calls or not self.graphs:
            return False
        return all(graph.whole for graph in self.graphs)

    @property
    def calls(self) -> tuple[int, int]:
        """The number of calls that compiled code served, and that eager PyTorch served instead.

        Calls past Dynamo's limit of graphs count; graphs with too few operators are left out.
        """
        eager = sum(sum(graph.eager_calls.values()) for graph in self.graphs if not graph.small)
        return sum(graph.calls for graph in self.graphs), eager + self.limited_calls

    @property
    def share(self) -> float:
        """The share of :attr:`calls` that compiled code served; 0 if there were no calls."""
        return share(*self.calls)

    @property
    def timed_calls(self) -> int:
        """The number of calls that eager PyTorch served to be timed, which ``share`` leaves out."""
        return sum(graph.timed_calls for graph in self.graphs)

    @property
    def aside_calls(self) -> int:
        """The number of calls that eager PyTorch served because it was faster.

        ``share`` leaves them out.
        """
        return sum(graph.aside_calls for graph in self.graphs)

    def __str__(self) -> str:
        from rich.markup import escape
        from rich.table import Table

        console = text_console()
        breaks = sum(self.breaks.values())
        large = [graph for graph in self.graphs if not graph.small]
        called = any(graph.calls or graph.eager_calls for graph in large)
        none = "none was called yet" if large or not self.graphs else "none is large enough"
        served = f"{self.share:.0%}" if called else none
        console.print(
            f"graphs: {len(self.graphs)}, graph breaks: {breaks}, calls of graphs served by TVM: "
            f"{served}",
        )
        if not self.graphs and not breaks:
            console.print(_NO_GRAPH)
        if self.timed_calls:
            console.print(f"calls by PyTorch, to time it: {self.timed_calls}")
        if self.aside_calls:
            console.print(f"calls by PyTorch, which is faster: {self.aside_calls}")
        if self.limited_calls:
            console.print(
                f"calls by PyTorch, past TorchDynamo's limit of graphs for a function: "
                f"{self.limited_calls}; functions with that many graphs: {', '.join(self.limited)}"
            )
        table = Table("graph", "operators", "by TVM", "by PyTorch", "because")
        for graph in self.graphs:
            reasons = "\n".join(graph.eager_calls)
            eager = sum(graph.eager_calls.values())
            row = graph.name, graph.operators, graph.calls, eager, escape(reasons)
            table.add_row(*map(str, row))
        console.print(table)
        for reason, count in self.breaks.items():
            console.print(f"graph breaks: {count}, because {escape(reason)}")
        advices = [_ADVICE.get(reason) or graph_break_hint(reason) for reason in self.breaks]
        if self.limited_calls:
            advices.append(_LIMIT_ADVICE)
        for advice in dict.fromkeys([*advices, *(graph.advice for graph in self.graphs)]):
            if advice:
                console.print(f"what to do: {advice}", markup=False)
        return console.file.getvalue()


def compile_report() -> CompileReport:
    """Return a report of the graphs that ``torch.compile`` has passed to tvmbridge so far.

    Graphs that Dynamo has dropped, together with the function they come from, are left out.
    """
    breaks = graph_breaks()
    breaks.subtract(_breaks_before)
    limited_calls, limited = past_limit()
    return CompileReport(
        graphs=tuple(graph_report(called) for _, called in sorted(_graphs.items())),
        breaks={reason: count for reason, count in breaks.items() if count > 0},
        limited_calls=limited_calls,
        limited=limited,
    )


def leave_out_breaks(found: Counter[str]) -> None:
    """Leave graph breaks out of :func:`compile_report`: those of modules that run in parts."""
    _breaks_before.update(found)


def graph_report(called: CompiledGraph | EagerGraph) -> GraphReport:
    """Return a report of one graph."""
    if isinstance(called, EagerGraph):
        eager = {called.reason: called.calls}
        return GraphReport(called.name, called.operators, 0, eager, small=called.small)
    reports = tuple(map(report_of, called.codes))
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

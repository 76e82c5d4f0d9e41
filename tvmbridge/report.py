"""Reports of a dispatched module, as data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tvm.target import Target

from tvmbridge.coloring import Recomputation
from tvmbridge.compiler.buffers import Reuse
from tvmbridge.compiler.packing import PackReport
from tvmbridge.core.compiled_half import missing_halves
from tvmbridge.core.reasons import Reason
from tvmbridge.core.text_console import text_console
from tvmbridge.core.types import PassRecord, ValueDescriptor
from tvmbridge.records import Coverage
from tvmbridge.records.meta import target_name
from tvmbridge.runtime.fallbacks import share, worst
from tvmbridge.runtime.module_code import ModuleCode
from tvmbridge.runtime.parts import PartReport
from tvmbridge.runtime.speed_trial import SpeedVerdict

# rich is imported only when a report is printed, so that dispatch does not import it.
if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SpecializationReport:
    """One compiled signature in one mode, for one set of tensors that require a gradient.

    - ``mode``, ``signature``, ``target``: the mode, the argument signature and the TVM target.
    - ``joint``: who derived the joint function; None without a backward.
    - ``joint_reason``: why ``joint`` is not ``relax``; empty if it is.
    - ``calls``: the number of calls served.
    - ``seconds``: seconds by stage of compilation.
    - ``residual_bytes``: bytes that forward keeps for backward beyond its inputs and outputs.
      Random draws of dropout count.
    - ``residuals``: the values that these bytes belong to, the largest first.
    - ``recomputation``: the bytes and the time predicted under a memory budget; None without one,
      and for code from disk without capture.
    - ``native_operators``, ``aten_operators``: the number of operators that TVM compiles, and that
      PyTorch's kernels run, by ATen overload.
    - ``kernels``: the number of kernel calls in the code by origin: tuned, scheduled by rule,
      external.
    - ``passes``: one record for each pass.
    - ``eager_functions``: operators that run in eager PyTorch after the compiled code, counted.
    - ``checked``, ``checked_gradients``: calls and backwards that agreed with the module's own
      forward (``CompileOptions.check``).
    - ``partial_backwards``: backwards compiled for calls with unused outputs.
    - ``backward_halves``: runs of backward for which autograd asked for a part of the gradients:
      ``inputs`` and ``weights`` count the code of each half. ``whole`` counts runs of the whole
      backward, whose other gradients are kept until autograd asks for them.
    - ``second_order_backwards``: backwards that PyTorch computed from the module's own forward,
      because they must be differentiable themselves (``create_graph=True``).
    - ``gradients``: names of the inputs and parameters whose gradients the code computes.
    - ``graph_replays``: CUDA graphs replayed, in forward and backward.
    - ``graph_skips``: calls without a CUDA graph, by reason. Calls before the capture of a graph
      count neither as replays nor as skips.
    - ``cache``: ``hit`` if the code came from the cache on disk. Otherwise ``miss`` with the
      entries of its key that no cached code has, or ``off`` with the reason.
    - ``recalled``: ``from disk, without capture`` if an earlier process has captured the module.
      Otherwise why this process did; empty if the option ``recall`` is off.
    - ``reuse``: by function, the bytes of its intermediate values with and without sharing.
      Functions for any size, and functions on a GPU, where PyTorch allocates memory, are left out.
    - ``verdict``: the seconds of a call by the code and by the module's own forward; None before
      both are timed.
    - ``timed_calls``: calls that the module's own forward served so that it could be timed.
    - ``aside_calls``: calls that the module's own forward served because it was faster.
    """

    mode: str
    signature: str
    target: str
    joint: str | None
    joint_reason: str
    calls: int
    seconds: Mapping[str, float]
    residual_bytes: int
    residuals: tuple[ValueDescriptor, ...]
    native_operators: Mapping[str, int]
    aten_operators: Mapping[str, int]
    kernels: Coverage
    passes: tuple[PassRecord, ...]
    recomputation: Recomputation | None = None
    eager_functions: Mapping[str, int] = field(default_factory=dict)
    checked: int = 0
    checked_gradients: int = 0
    partial_backwards: int = 0
    backward_halves: Mapping[str, int] = field(default_factory=dict)
    second_order_backwards: int = 0
    gradients: tuple[str, ...] = ()
    graph_replays: int = 0
    graph_skips: Mapping[str, int] = field(default_factory=dict)
    cache: str = ""
    recalled: str = ""
    reuse: Mapping[str, Reuse] = field(default_factory=dict)
    verdict: SpeedVerdict | None = None
    timed_calls: int = 0
    aside_calls: int = 0

    @property
    def share(self) -> float:
        """Return TVM's share of the kernel calls in the code; PyTorch serves the other calls."""
        return (self.kernels.calls - self.kernels.external) / max(1, self.kernels.calls)


@dataclass(frozen=True)
class DispatchReport:
    """The calls of a dispatched module, its fallbacks, and its specializations.

    - ``tvm_calls``: the number of calls that TVM served.
    - ``fallbacks``: the number of other calls, by reason.
    - ``aten_calls``: the operators that PyTorch's kernels run within compiled code.
    - ``specializations``: one report for each specialization.
    - ``dropped``: the number of specializations that were discarded for newer ones.
    - ``packs``: reports of packed weights.
    - ``unchecked``: calls that were due for a check but could not be checked, by reason.
    - ``reasons``: by each text of ``fallbacks``, the first such reason, with its kind and advice.
    - ``under_way``: the code that another process is compiling now.
    - ``missing_halves``: for each C++ library that this process lacks, why it is missing and the
      cost.
    - ``methods``: reports by name of method, forward included; empty if only forward is dispatched.
      The other fields are then sums over the methods.
    - ``parts``: the graphs of a module that is compiled in parts.
    - ``cut``: why the module is compiled in parts; None if it is not. A call in parts counts as
      served if all its parts were served.
    - ``breaks``: operations that PyTorch runs between the parts, counted (``on_break``).
    - ``of_parts``: the speed trials of calls in parts: how many calls the own forward served to be
      timed, and how many because it is faster, and the verdicts.
    """

    tvm_calls: int
    fallbacks: dict[str, int]
    aten_calls: list[str]
    specializations: list[SpecializationReport]
    dropped: int = 0
    packs: tuple[PackReport, ...] = ()
    unchecked: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    under_way: tuple[str, ...] = ()
    missing_halves: tuple[str, ...] = ()
    methods: Mapping[str, DispatchReport] = field(default_factory=dict)
    parts: tuple[PartReport, ...] = ()
    breaks: Mapping[str, int] = field(default_factory=dict)
    cut: str | None = None
    of_parts: tuple[int, int, tuple[SpeedVerdict, ...]] = (0, 0, ())

    @property
    def share(self) -> float:
        """Return the share of the calls so far that TVM served; 0 if there were none.

        Calls of methods that are not dispatched are not counted. Calls that the module's own
        forward served to be timed, or because it is faster, are not counted either.
        """
        return share(self.tvm_calls, sum(self.fallbacks.values()))

    @property
    def timed_calls(self) -> int:
        """Return the number of calls, no fallbacks, that the own forward served to be timed."""
        return sum(s.timed_calls for s in self.specializations) + self.of_parts[0]

    @property
    def aside_calls(self) -> int:
        """Return the number of calls that the module's own forward served because it was faster.

        Such a call is no fallback.
        """
        return sum(s.aside_calls for s in self.specializations) + self.of_parts[1]

    @property
    def advice(self) -> str | None:
        """Return advice about the most frequent fallback reason; None if there is no fallback."""
        text = worst(self.fallbacks, self.reasons)
        return None if text is None else self.reasons[text].advice

    @property
    def examples(self) -> dict[str, str]:
        """Return details of the first call by reason: names, shapes and values."""
        return {text: reason.example for text, reason in self.reasons.items()}

    @property
    def checked_calls(self) -> int:
        """Return the number of calls that were checked with the module's forward and agreed."""
        return sum(s.checked for s in self.specializations)

    def __str__(self) -> str:
        from rich.markup import escape
        from rich.table import Table

        console = text_console()
        calls = self.tvm_calls + sum(self.fallbacks.values())
        if calls:
            console.print(f"calls served by TVM: {self.tvm_calls} of {calls} ({self.share:.0%})")
        elif not self.timed_calls + self.aside_calls:
            console.print("no call yet; methods other than forward are served where they are named")
        for name, report in self.methods.items():
            console.print(f"{name}: {_calls_text(report)}")
        for line in _speed_lines(self):
            console.print(line, markup=False)
        if self.checked_calls:
            gradients = sum(s.checked_gradients for s in self.specializations)
            console.print(f"checked against PyTorch: {self.checked_calls}, backward: {gradients}")
        for half in self.missing_halves:
            console.print(half, markup=False)
        for what in self.under_way:
            console.print(f"in the background: {what}")
        for reason, count in self.unchecked.items():
            console.print(f"calls not checked: {count}, because {reason}")
        console.print(_specialization_table(self.specializations))
        if self.dropped:
            console.print(f"specialisations dropped, not used for longest: {self.dropped}")
        alike = Counter((s.mode, s.signature) for s in self.specializations)
        for s in self.specializations:
            if alike[s.mode, s.signature] > 1:
                line = f"{s.mode} {s.signature}: gradients of {len(s.gradients)} tensors"
                console.print(f"{line} in {s.calls} calls")
        for reason in dict.fromkeys(s.joint_reason for s in self.specializations):
            if reason:
                console.print(f"joint by PyTorch's own derivatives: {reason}")
        for line in _part_lines(self):
            console.print(line, markup=False)
        for pack in self.packs:
            console.print(str(pack))
        for s in self.specializations:
            line = f"kernels, {s.mode} {s.signature}: {s.kernels} ({s.share:.0%} compiled by TVM)"
            console.print(line)
            if s.kernels.external and not s.share:
                console.print("there is nothing to gain: each of its kernels is PyTorch's own")
            for function, reuse in s.reuse.items():
                line = f"buffers, {s.mode} {s.signature}, {function}: {reuse}"
                console.print(line)
            if s.recalled:
                line = f"capture, {s.mode} {s.signature}: {s.recalled}"
                console.print(line, markup=False)
            if s.cache:
                console.print(f"cache, {s.mode} {s.signature}: {s.cache}")
        for line in _untuned_lines(self.specializations):
            console.print(line, markup=False, soft_wrap=True)
        for line in _graph_lines(self.specializations):
            console.print(line, markup=False)
        partial = sum(s.partial_backwards for s in self.specializations)
        if partial:
            console.print(f"backward compiled again without outputs that nothing used: {partial}")
        halves = sum((Counter(s.backward_halves) for s in self.specializations), Counter[str]())
        if halves:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(halves.items()))
            console.print(f"backward in halves: {counts}")
        second = sum(s.second_order_backwards for s in self.specializations)
        if second:
            console.print(f"backward by PyTorch, for create_graph=True: {second}")
        for s in self.specializations:
            if s.residuals:
                console.print(residuals_text(s.residuals))
            if s.recomputation is not None:
                console.print(str(s.recomputation))
        if self.fallbacks:
            table = Table("calls to the module's own forward, because", "calls")
            for reason, count in self.fallbacks.items():
                told = "\n".join(filter(None, (reason, self.examples.get(reason))))
                table.add_row(escape(told), str(count))
            console.print(table)
            if self.advice:
                console.print(f"what to do first: {self.advice}")
        if self.aten_calls:
            console.print("ATen calls (PyTorch's kernels): " + ", ".join(self.aten_calls))
        eager = dict.fromkeys(name for s in self.specializations for name in s.eager_functions)
        if eager:
            console.print(f"runs eagerly after the compiled code: {', '.join(eager)}")
        return console.file.getvalue()


def report_of(code: ModuleCode) -> DispatchReport:
    """Return a report of the dispatch of one forward or method."""
    reports = [
        SpecializationReport(
            mode=str(mode),
            signature=str(specialization.signature),
            target=str(entry.compiled.target),
            joint=entry.compiled.joint,
            joint_reason=entry.compiled.joint_reason,
            calls=entry.calls,
            checked=entry.checked,
            checked_gradients=entry.checked_gradients,
            seconds=dict(entry.compiled.seconds),
            residual_bytes=entry.compiled.residual_bytes,
            residuals=entry.compiled.residuals,
            recomputation=None if (split := entry.compiled.split) is None else split.recomputation,
            native_operators=dict(entry.compiled.native_calls),
            aten_operators=dict(entry.compiled.aten_calls),
            kernels=entry.compiled.coverage,
            eager_functions=dict(entry.compiled.eager_functions),
            passes=entry.compiled.records,
            partial_backwards=0 if (p := entry.compiled.partial_backwards) is None else p.compiled,
            backward_halves={} if (c := entry.training) is None else dict(c.half_runs),
            second_order_backwards=entry.second_order.backwards,
            gradients=entry.gradients,
            graph_replays=entry.graph_replays.total(),
            graph_skips=dict(entry.graph_skips),
            cache=entry.compiled.cache,
            recalled=entry.recalled,
            reuse=entry.compiled.reuse,
            verdict=None if (t := entry.trial) is None else t.verdict,
            timed_calls=0 if t is None else t.timed_calls,
            aside_calls=0 if t is None else t.aside_calls,
        )
        for specialization in code.policy.specializations()
        for mode, entry in specialization.compiled()
    ]
    code.policy.join_if_unhooked()
    return DispatchReport(
        tvm_calls=code.served(),
        fallbacks=dict(code.tally.counts),
        reasons=dict(code.tally.reasons),
        dropped=code.kept.dropped,
        aten_calls=sorted({name for r in reports for name in r.aten_operators}),
        specializations=reports,
        packs=code.packing.reports(),
        under_way=code.background.under_way(),
        missing_halves=tuple(map(str, missing_halves())),
        unchecked={} if code.checker is None else dict(code.checker.unchecked),
        parts=() if code.policy.cut.parts is None else code.policy.cut.parts.reports(),
        breaks={} if code.policy.cut.parts is None else code.policy.cut.parts.breaks(),
        cut=code.policy.cut.why,
        of_parts=code.parts_trials.summary(),
    )


def report_of_all(codes: Mapping[str, ModuleCode]) -> DispatchReport:
    """Return one report for all dispatched methods of a module.

    If only forward is dispatched, the result is its report. Otherwise the counts are sums, and
    ``methods`` has the report of each method.
    """
    reports = {name: report_of(code) for name, code in codes.items()}
    if list(reports) == ["forward"]:
        return reports["forward"]
    parts = reports.values()
    return DispatchReport(
        tvm_calls=sum(r.tvm_calls for r in parts),
        fallbacks={f"{m}: {k}": v for m, r in reports.items() for k, v in r.fallbacks.items()},
        reasons={f"{m}: {k}": v for m, r in reports.items() for k, v in r.reasons.items()},
        dropped=sum(r.dropped for r in parts),
        aten_calls=sorted({name for r in parts for name in r.aten_calls}),
        specializations=[
            replace(s, mode=f"{name}, {s.mode}")
            for name, r in reports.items()
            for s in r.specializations
        ],
        packs=tuple(pack for r in parts for pack in r.packs),
        under_way=tuple(what for r in parts for what in r.under_way),
        unchecked={f"{m}: {k}": v for m, r in reports.items() for k, v in r.unchecked.items()},
        methods=reports,
        parts=tuple(part for r in parts for part in r.parts),
        breaks=dict(sum((Counter(r.breaks) for r in parts), Counter[str]())),
        cut=next((r.cut for r in parts if r.cut), None),
        of_parts=(
            sum(r.of_parts[0] for r in parts),
            sum(r.of_parts[1] for r in parts),
            tuple(verdict for r in parts for verdict in r.of_parts[2]),
        ),
    )


def _part_lines(report: DispatchReport) -> list[str]:
    """Return lines about a module's parts, and the operations that PyTorch runs between them."""
    if report.cut is None:
        return []
    lines = [f"compiled in parts, because {report.cut}"]
    for reason, count in report.breaks.items():
        lines.append(f"runs in eager PyTorch between parts, {count} cuts: {reason}")
    for part in report.parts:
        eager = "".join(f", {count} by PyTorch ({why})" for why, count in part.eager_calls.items())
        ends = f"; ends: {part.ends}" if part.ends else ""
        lines.append(
            f"part {part.name}, {part.operators} operators: {part.calls} calls by TVM{eager}{ends}"
        )
    return lines


def _calls_text(report: DispatchReport) -> str:
    calls = report.tvm_calls + sum(report.fallbacks.values())
    if not calls:
        return "no call so far"
    return f"{report.tvm_calls} of {calls} calls served by TVM ({report.share:.0%})"


def _speed_lines(report: DispatchReport) -> list[str]:
    """Return lines about calls that the module's own forward served, and the measured times."""
    lines = []
    if report.timed_calls:
        lines.append(f"calls by the module's own forward, to time it: {report.timed_calls}")
    if report.aside_calls:
        lines.append(f"calls by the module's own forward, which is faster: {report.aside_calls}")
    for s in report.specializations:
        if s.verdict is not None:
            lines.append(f"speed, {s.mode} {s.signature}: {s.verdict.text()}")
    lines += [f"speed, in parts: {verdict.text()}" for verdict in report.of_parts[2]]
    return lines


def residuals_text(residuals: Sequence[ValueDescriptor]) -> str:
    """Return one line: the bytes kept for backward, and the three largest values."""
    total = sum(r.spec.nbytes for r in residuals) / 1e6
    largest = ", ".join(
        f"{r.name} {r.spec} of {r.made_by} {r.spec.nbytes / 1e6:.1f} MB" for r in residuals[:3]
    )
    more = f", {len(residuals) - 3} more" if len(residuals) > 3 else ""
    return f"kept for backward: {total:.1f} MB ({largest}{more})"


def _graph_lines(specializations: Sequence[SpecializationReport]) -> list[str]:
    """Return lines about CUDA graphs; none if CUDA graphs were not requested."""
    replays = sum(s.graph_replays for s in specializations)
    skips: Counter[str] = Counter()
    for s in specializations:
        skips.update(s.graph_skips)
    lines = [f"calls without a CUDA graph: {n}, because {reason}" for reason, n in skips.items()]
    return [f"CUDA graphs replayed: {replays}", *lines] if replays or skips else []


def _untuned_lines(specializations: Sequence[SpecializationReport]) -> list[str]:
    """Return, for each target without a tuning record in use, a line on how to create records."""
    tuned = {s.target for s in specializations if s.kernels.tuned}
    untuned: Counter[str] = Counter()
    for s in specializations:
        if s.target not in tuned:
            untuned[s.target] += s.kernels.untuned
    return [
        f"kernels that nobody has tuned for {target_name(Target(target))}: {count}; "
        "`python -m tvmbridge tune package.module:factory` on this machine makes records, "
        "TVMBRIDGE_TUNING_LOGS=tuning_logs has compilation use them (docs/tuning.md)"
        for target, count in untuned.items()
        if count
    ]


def _specialization_table(specializations: list[SpecializationReport]) -> Table:
    from rich.table import Table

    table = Table("mode", "signature", "joint", "calls", "compile s", "residual MB", "native/ATen")
    for s in specializations:
        table.add_row(
            s.mode,
            s.signature,
            s.joint or "-",
            str(s.calls),
            " ".join(f"{stage} {seconds:.1f}" for stage, seconds in s.seconds.items()),
            f"{s.residual_bytes / 1e6:.1f}",
            f"{sum(s.native_operators.values())}/{sum(s.aten_operators.values())}",
        )
    return table

"""What a comparison found, as data and as a table."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby

from rich.console import Console
from rich.table import Table

from tvmbridge.core.errors import NumericsError
from tvmbridge.inspect.compare.verdict import AGREES, MISTAKE, ROUNDING

_STYLES = {AGREES: "dim", ROUNDING: "green", MISTAKE: "bold red"}


@dataclass(frozen=True)
class Figure:
    """The departure of one value at one stage from eager PyTorch.

    ``error`` is in the module's own dtype and ``error_float64`` in float64, both relative to the
    scale of the value; ``bound`` and ``bound_float64`` are what rounding explains. The float64
    figures are None where the module does not run in float64. At the stage ``eager`` the error is
    that of eager PyTorch itself, in the module's dtype against float64.
    """

    value: str
    stage: str
    error: float
    bound: float
    error_float64: float | None
    bound_float64: float | None
    verdict: str


@dataclass(frozen=True)
class Departure:
    """The first stage at which a value departs, and the operator that it departs at.

    ``operator`` is the one that stands in the stage before and whose value the stage does not
    reproduce, ``becomes`` what the stage has in its place, ``source`` the user's line it comes
    from. ``verdict`` is ``"rounding"`` or ``"mistake"``; the errors are those of the figures.
    """

    value: str
    stage: str
    operator: str
    source: str
    verdict: str
    error: float
    error_float64: float | None
    becomes: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict} in {self.value}: stage {self.stage}, operator {self.operator}"
        if self.becomes and self.becomes != self.operator:
            text += f" (now {self.becomes})"
        if self.source:
            text += f", from {self.source}"
        text += f"; off by {self.error:.1e}"
        if self.error_float64 is not None:
            text += f", in float64 by {self.error_float64:.1e}"
        return text


@dataclass(frozen=True)
class ComparisonReport:
    """The result of :func:`tvmbridge.compare`.

    ``stages`` are the stages that were evaluated, in order (passes that changed nothing are left
    out); ``values`` the compared outputs and gradients by name. ``departures`` has for each value
    the first stage where rounding shows, and each stage that makes a mistake, in order of stages.
    ``reason`` says why nothing could be compared (empty otherwise), ``notes`` what else there is
    to know.
    """

    dtype: str
    stages: tuple[str, ...]
    values: tuple[str, ...]
    figures: tuple[Figure, ...]
    departures: tuple[Departure, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def refused(cls, reason: str) -> ComparisonReport:
        """The report of a module that cannot be compared at all."""
        return cls("", (), (), (), (), reason)

    @property
    def mistakes(self) -> tuple[Departure, ...]:
        """The departures that rounding does not explain."""
        return tuple(d for d in self.departures if d.verdict == MISTAKE)

    @property
    def first(self) -> Departure | None:
        """The first mistake; None: there is none."""
        return next(iter(self.mistakes), None)

    @property
    def ok(self) -> bool:
        """Whether everything was compared and there is no mistake."""
        return not self.reason and not self.mistakes

    def figure(self, value: str, stage: str) -> Figure:
        """The figure of one value at one stage.

        Raises:
            KeyError: there is no such value or stage.
        """
        found = {(figure.value, figure.stage): figure for figure in self.figures}
        if (value, stage) not in found:
            raise KeyError(
                f"no figure of {value!r} at {stage!r}; values are {list(self.values)}, stages "
                f"{list(self.stages)}"
            )
        return found[value, stage]

    def raise_for_mistakes(self) -> None:
        """Raise if something is wrong.

        Raises:
            NumericsError: the first mistake, by value, stage and operator; or why nothing could
                be compared.
        """
        if self.reason:
            raise NumericsError(f"nothing could be compared: {self.reason}")
        if self.first is not None:
            others = len(self.mistakes) - 1
            more = f" ({others} more values or stages)" if others else ""
            raise NumericsError(f"{self.first}{more}")

    def to_json(self) -> str:
        """Everything that the report holds, as JSON."""
        return json.dumps({**asdict(self), "ok": self.ok}, indent=2)

    def __str__(self) -> str:
        file = io.StringIO()
        console = Console(file=file, force_terminal=False, force_jupyter=False, width=118)
        if self.reason:
            console.print(f"cannot compare: {self.reason}", highlight=False, markup=False)
        if self.stages:
            console.print(_table(self))
        count = len(self.mistakes)
        summary = "rounding, no mistake" if self.departures else "agrees"
        if count:
            summary = f"{count} mistake{'s' * (count > 1)}"
        lines = [f"values: {len(self.values)}, verdict: {summary}"] if self.values else []
        lines += [f"* {departure}" for departure in self.mistakes[:10]]
        lines += [f"note: {note}" for note in self.notes]
        for line in lines:
            console.print(line, highlight=False, markup=False)
        return file.getvalue()


def _table(report: ComparisonReport) -> Table:
    """A row for each stage, with the value that departs most in units of its bound.

    Stages whose figures are all those of the stage before share its row.
    """
    own = report.dtype
    columns = ("stage", "value that departs most", own, "rounding up to", "float64", "up to", "")
    table = Table(*columns, title=f"departure from eager PyTorch ({own})")
    for column in table.columns[2:6]:
        column.justify = "right"
    for figures, group in groupby(report.stages, key=partial(_figures, report)):
        if not figures:
            continue
        stages, worst = list(group), max(figures, key=_excess)
        numbers = (worst.error, worst.bound, worst.error_float64, worst.bound_float64)
        table.add_row(
            stages[0] if len(stages) == 1 else f"{stages[0]} … {stages[-1]}",
            worst.value,
            *("-" if number is None else f"{number:.1e}" for number in numbers),
            f"[{_STYLES[worst.verdict]}]{worst.verdict}[/]",
        )
    return table


def _figures(report: ComparisonReport, stage: str) -> list[Figure]:
    return [replace(f, stage="") for f in report.figures if f.stage == stage]


def _excess(figure: Figure) -> float:
    """The departure in units of its bound, the larger of the two precisions'."""
    error64, bound64 = figure.error_float64 or 0.0, figure.bound_float64 or 1.0
    return max(figure.error / (figure.bound or 1.0), error64 / bound64)

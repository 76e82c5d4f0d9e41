"""The report of a comparison, as data and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby

from rich.table import Table

from tvmbridge.core.errors import NumericsError
from tvmbridge.core.text_console import text_console
from tvmbridge.inspect.compare.verdict import AGREES, MISTAKE, ROUNDING

_STYLES = {AGREES: "dim", ROUNDING: "green", MISTAKE: "bold red"}


@dataclass(frozen=True)
class Figure:
    """The departure of one value at one stage from eager PyTorch.

    At the stage ``eager``, ``error`` compares eager PyTorch in the module's dtype with float64.

    - ``value``: the name of the value.
    - ``error``: the departure in the module's own dtype, relative to the scale of the value.
    - ``bound``: the largest error that rounding explains.
    - ``error_float64``, ``bound_float64``: the same in float64; None if the module does not run in
      float64.
    - ``verdict``: ``"agrees"``, ``"rounding"`` or ``"mistake"``.
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
    """A stage at which a value departs from eager PyTorch, and the operator responsible.

    - ``value``: the name of the value.
    - ``operator``: the operator of the stage before whose value this stage does not reproduce.
    - ``source``: the user's source line of the operator; empty if it is unknown.
    - ``verdict``: ``"rounding"`` or ``"mistake"``.
    - ``error``, ``error_float64``: the errors of the :class:`Figure` of this value and stage.
    - ``becomes``: the operators that replace it at this stage; empty if they are unknown.
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

    - ``dtype``: the module's own dtype.
    - ``stages``: the evaluated stages, in order, without passes that changed nothing.
    - ``values``: the names of the compared outputs and gradients.
    - ``figures``: the departure of each value at each stage.
    - ``departures``: for each value, the first stage with a rounding difference and each stage
      that introduces a mistake, in the order of the stages.
    - ``reason``: why the comparison failed; empty if it did not.
    - ``notes``: limits of the comparison, in words.
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
        """Return the report of a module that cannot be compared at all."""
        return cls("", (), (), (), (), reason)

    @property
    def mistakes(self) -> tuple[Departure, ...]:
        """The departures that rounding does not explain."""
        return tuple(d for d in self.departures if d.verdict == MISTAKE)

    @property
    def first(self) -> Departure | None:
        """The first mistake; None if there is none."""
        return next(iter(self.mistakes), None)

    @property
    def ok(self) -> bool:
        """Whether everything was compared and there is no mistake."""
        return not self.reason and not self.mistakes

    def figure(self, value: str, stage: str) -> Figure:
        """Return the figure of one value at one stage.

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
        """Raise an error if there is a mistake, or if nothing could be compared.

        Raises:
            NumericsError: its message names the first mistake by value, stage and operator, or
                says why nothing could be compared.
        """
        if self.reason:
            raise NumericsError(f"nothing could be compared: {self.reason}")
        if self.first is not None:
            others = len(self.mistakes) - 1
            more = f" ({others} more values or stages)" if others else ""
            raise NumericsError(f"{self.first}{more}")

    def to_json(self) -> str:
        """Return all fields of the report, and ``ok``, as JSON."""
        return json.dumps({**asdict(self), "ok": self.ok}, indent=2)

    def __str__(self) -> str:
        console = text_console(118)
        if self.reason:
            console.print(f"cannot compare: {self.reason}", markup=False)
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
            console.print(line, markup=False)
        return console.file.getvalue()


def _table(report: ComparisonReport) -> Table:
    """Return a table of each stage's worst value by its bound; equal stages share a row."""
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
    """Return the departure divided by its bound: the larger quotient of the two precisions."""
    error64, bound64 = figure.error_float64 or 0.0, figure.bound_float64 or 1.0
    return max(figure.error / (figure.bound or 1.0), error64 / bound64)

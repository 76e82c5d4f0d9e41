"""What a comparison found, as data and as a table."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, replace

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
        for figure in self.figures:
            if (figure.value, figure.stage) == (value, stage):
                return figure
        raise KeyError(
            f"no figure of {value!r} at {stage!r}; values are {list(self.values)}, stages "
            f"{list(self.stages)}"
        )

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
        console = Console(file=io.StringIO(), force_terminal=False, force_jupyter=False, width=118)
        if self.reason:
            console.print(f"cannot compare: {self.reason}", highlight=False, markup=False)
        if self.stages:
            console.print(_table(self))
        console.print(f"values: {len(self.values)}, verdict: {self._summary()}", highlight=False)
        for departure in self.mistakes[:10]:
            console.print(f"* {departure}", highlight=False, markup=False)
        for note in self.notes:
            console.print(f"note: {note}", highlight=False, markup=False)
        file = console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()

    def _summary(self) -> str:
        if self.mistakes:
            return f"{len(self.mistakes)} mistake{'s' * (len(self.mistakes) > 1)}"
        found = {d.verdict for d in self.departures}
        return "rounding, no mistake" if found else "agrees"


def _table(report: ComparisonReport) -> Table:
    """A row for each stage, with the value that departs most in units of its bound.

    Stages whose figures are all those of the stage before share its row.
    """
    own = report.dtype
    columns = ("stage", "value that departs most", own, "rounding up to", "float64", "up to", "")
    table = Table(*columns, title=f"departure from eager PyTorch ({own})")
    for column in table.columns[2:6]:
        column.justify = "right"
    for stages, figures in _rows(report):
        label = stages[0] if len(stages) == 1 else f"{stages[0]} … {stages[-1]}"
        worst = max(figures, key=_excess)
        table.add_row(
            label,
            worst.value,
            f"{worst.error:.1e}",
            f"{worst.bound:.1e}",
            "-" if worst.error_float64 is None else f"{worst.error_float64:.1e}",
            "-" if worst.bound_float64 is None else f"{worst.bound_float64:.1e}",
            f"[{_STYLES[worst.verdict]}]{worst.verdict}[/]",
        )
    return table


def _rows(report: ComparisonReport) -> list[tuple[list[str], list[Figure]]]:
    """Stages in order with their figures; equal neighbours together."""
    rows: list[tuple[list[str], list[Figure]]] = []
    for stage in report.stages:
        here = [f for f in report.figures if f.stage == stage]
        if rows and [replace(f, stage="") for f in here] == [
            replace(f, stage="") for f in rows[-1][1]
        ]:
            rows[-1][0].append(stage)
        elif here:
            rows.append(([stage], here))
    return rows


def _excess(figure: Figure) -> float:
    """The departure in units of its bound, the larger of the two precisions'."""
    ratios = [figure.error / figure.bound if figure.bound else figure.error]
    if figure.error_float64 is not None and figure.bound_float64 is not None:
        bound = figure.bound_float64
        ratios.append(figure.error_float64 / bound if bound else figure.error_float64)
    return max(ratios)

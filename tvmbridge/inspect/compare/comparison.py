"""One comparison: both precisions go through the stages side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.options import CompileOptions
from tvmbridge.graph_capture.observe.refusal import first_paragraph
from tvmbridge.inspect.compare.locate import source_of
from tvmbridge.inspect.compare.machine import CompiledCode
from tvmbridge.inspect.compare.precision import Precision, unit_of
from tvmbridge.inspect.compare.report import ComparisonReport, Departure, Figure
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.stages import Stage
from tvmbridge.inspect.compare.trace import Trace
from tvmbridge.inspect.compare.verdict import AGREES, MISTAKE, ROUNDING, verdict
from tvmbridge.pipeline import AnyPass

STAGES = ("eager", "captured", "imported", "passes", "compiled")

_GRADIENT = "gradient of "


class Comparison:
    """A comparison that is under way; see :func:`tvmbridge.compare` for the arguments."""

    def __init__(
        self,
        sample: Sample,
        backward: bool,
        stages: frozenset[str],
        options: CompileOptions,
        passes: Sequence[AnyPass],
    ) -> None:
        self.sample = sample
        self.backward = backward
        self.chosen = stages
        self.options = options
        self.passes = passes
        self.wide: Precision | None = None
        self.evaluated: list[str] = []
        self.figures: list[Figure] = []
        self.departures: list[Departure] = []
        self.notes: list[str] = []
        self._rounded: set[str] = set()

    def run(self) -> ComparisonReport:
        """Evaluate and compare the stages."""
        try:
            self.own = Precision.of(self.sample, self.backward)
        except Exception as error:
            return ComparisonReport.refused(f"forward refuses the sample: {_first(error)}")
        reason = ""
        try:
            self._widen()
            self._compare_eager()
            self._lower()
            self._compare_stages()
        except BridgeError as error:
            reason = str(error)
        return ComparisonReport(
            dtype=self._dtype(),
            stages=tuple(self.evaluated),
            values=tuple(dict.fromkeys(f.value for f in self.figures)),
            figures=tuple(self.figures),
            departures=tuple(self.departures),
            reason=reason,
            notes=tuple(self.notes),
        )

    def _dtype(self) -> str:
        dtypes = self.sample.dtypes or [torch.get_default_dtype()]
        return str(dtypes[0]).removeprefix("torch.")

    @property
    def _is_wide(self) -> bool:
        """Whether the module's own precision is float64."""
        return not set(self.sample.dtypes) - {torch.float64}

    def _widen(self) -> None:
        """Eager PyTorch in float64, unless that is the module's own dtype."""
        if self._is_wide:
            return
        try:
            self.wide = Precision.of(self.sample.in_float64(), self.backward)
            if unit_of(self.wide.reference.trace) > torch.finfo(torch.float64).eps:
                self.notes.append(
                    "parts of the module compute in a lower precision even when it is float64, so "
                    "the bounds in float64 are wide"
                )
        except Exception as error:
            self.notes.append(f"the module does not run in float64: {_first(error)}")

    def _lower(self) -> None:
        names = self.own.reference.trace.results
        needs_grad = self.backward and any(n.startswith(_GRADIENT) for n in names)
        if self.chosen == {"eager"}:
            return
        self.own.lower(needs_grad, self.options, self.passes)
        route = self.own.route
        assert route is not None
        derivation = route.lowered.derivation
        options = self.options
        if derivation is not None:
            options = replace(options, joint=derivation.source)
            if derivation.reason:
                self.notes.append(f"joint by PyTorch's own derivatives: {derivation.reason}")
        if self.wide is not None:
            try:
                self.wide.lower(needs_grad, options, self.passes)
            except BridgeError as error:
                self.notes.append(f"not compared in float64: {error}")
                self.wide = None

    @property
    def _precisions(self) -> list[Precision]:
        return [self.own] if self.wide is None else [self.own, self.wide]

    # The stages ----------------------------------------------------------------------------------

    def _compare_eager(self) -> None:
        """Eager PyTorch itself: how far its own rounding takes it from float64."""
        if self.wide is None:
            return
        self.evaluated.append("eager")
        for name in self._expected(self.own.reference.trace):
            if name in self.own.reference.unwritten:
                continue
            value = self.own.reference.trace.result(name)
            exact = self.wide.reference.trace.result(name)
            measure = self.own.measures[name]
            if value is None or exact is None:
                continue
            error = measure.departure(value, exact.to(value.dtype))
            kind = ROUNDING if error > 0 else AGREES
            bound64 = self.wide.bound(name)
            self.figures.append(Figure(name, "eager", error, measure.bound, 0.0, bound64, kind))

    def _compare_stages(self) -> None:
        if self.own.route is None:
            return
        wide = (
            {}
            if self.wide is None or self.wide.route is None
            else {s.name: s for s in self.wide.route.stages}
        )
        for stage in self.own.route.stages:
            other = wide.get(stage.name)
            changed = stage.changed or (other is not None and other.changed)
            if stage.group in self.chosen and changed and self._evaluate(stage, other):
                self._compare(stage.name)
        if "compiled" in self.chosen:
            for precision in self._precisions:
                assert precision.route is not None
                precision.code = CompiledCode(precision.route, self.options)
                precision.now = precision.code.trace()
            self._compare("compiled")

    def _evaluate(self, stage: Stage, other: Stage | None) -> bool:
        """Whether the stage could be evaluated in the module's own dtype."""
        for precision, part in zip(self._precisions, (stage, other), strict=False):
            precision.now = None
            if part is None:
                continue
            assert precision.route is not None
            try:
                precision.now = precision.route.trace(part)
            except Exception as error:
                self.notes.append(f"stage {stage.name} cannot be evaluated: {_first(error)}")
                continue
            if stage.name == "captured":
                precision.captured = precision.now
        return self.own.now is not None

    def _expected(self, trace: Trace) -> list[str]:
        """The values that a stage must have: gradients once it has any of them."""
        names = [
            n
            for n in self.own.reference.trace.results
            if n not in self.own.reference.unwritten or n in trace.results
        ]
        names += [n for n in trace.results if n not in self.own.reference.trace.results]
        has_gradients = any(n.startswith(_GRADIENT) for n in trace.results)
        return [n for n in names if has_gradients or not n.startswith(_GRADIENT)]

    def _compare(self, stage: str) -> None:
        assert self.own.now is not None
        self.evaluated.append(stage)
        for name in self._expected(self.own.now):
            self._compare_value(stage, name)
        for precision in self._precisions:
            if precision.now is not None:
                precision.settle()

    def _compare_value(self, stage: str, name: str) -> None:
        own, wide = self.own, self.wide
        error, bound = own.departure(name), own.bound(name)
        error64 = bound64 = None
        if wide is not None and wide.now is not None:
            error64, bound64 = wide.departure(name), wide.bound(name)
        elif self._is_wide:
            error64, bound64 = error, bound
        kind = verdict(error, bound, error64 or 0.0, bound64 or 0.0)
        self.figures.append(Figure(name, stage, error, bound, error64, bound64, kind))
        if kind == MISTAKE and self._is_new(name):
            wrong = own
            if wide is not None and error64 is not None and error64 > (bound64 or 0.0):
                wrong = wide
            size = min(1.0, wrong.departure(name))
            tolerance = _rounded_up(math.sqrt(size * max(wrong.bound(name), 1e-16)))
            self._depart(wrong, stage, name, MISTAKE, tolerance)
        elif kind == ROUNDING and name not in self._rounded:
            self._rounded.add(name)
            self._depart(own, stage, name, ROUNDING, 0.0)

    def _is_new(self, name: str) -> bool:
        """Whether the departure comes in with this stage, not with one before."""
        return any(p.now is not None and p.step(name) > p.bound(name) for p in self._precisions)

    def _depart(self, wrong: Precision, stage: str, name: str, kind: str, tolerance: float) -> None:
        figure = self.figures[-1]
        if stage == "compiled":
            operator, source, becomes = self._in_compiled(wrong, name, kind, tolerance)
        else:
            finding = wrong.locate(name, tolerance)
            operator, becomes = finding.operator, finding.becomes
            source = source_of(finding.before, self._sources(wrong), tolerance)
        self.departures.append(
            Departure(
                value=name,
                stage=stage,
                operator=operator,
                source=source,
                verdict=kind,
                error=figure.error,
                error_float64=figure.error_float64,
                becomes=becomes,
            )
        )

    def _in_compiled(
        self, wrong: Precision, name: str, kind: str, tolerance: float
    ) -> tuple[str, str, str]:
        assert wrong.code is not None
        kernels = wrong.code.kernels(name)
        if kind == ROUNDING:
            return "compiled code", "", kernels
        try:
            step = wrong.code.departing(name, tolerance)
        except Exception as error:
            self.notes.append(f"compiled code of {name} could not be taken apart: {_first(error)}")
            return "compiled code", "", ""
        if step is None:
            return "compiled code", "", kernels
        return step.operator, source_of(step, self._sources(wrong), max(tolerance, 1e-9)), kernels

    def _sources(self, wrong: Precision) -> list[Trace]:
        """The traces that know lines of Python."""
        found = [] if wrong.captured is None else [wrong.captured]
        return [*found, wrong.reference.trace]


def _rounded_up(tolerance: float) -> float:
    """A power of ten, so that values of one stage share their matching."""
    return 10.0 ** math.ceil(math.log10(tolerance))


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {first_paragraph(error)}"

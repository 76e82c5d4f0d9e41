"""Compare every stage of compilation with eager PyTorch, in two precisions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.options import CompileOptions
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.graph_capture.observe.refusal import first_paragraph, sample_advice
from tvmbridge.inspect.compare.compiled import CompiledCode
from tvmbridge.inspect.compare.precision import Precision
from tvmbridge.inspect.compare.report import ComparisonReport, Departure, Figure
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.stages import Lowering
from tvmbridge.inspect.compare.trace import Trace
from tvmbridge.inspect.compare.verdict import AGREES, MISTAKE, ROUNDING, verdict
from tvmbridge.pipeline import AnyPass

STAGES = ("eager", "captured", "imported", "passes", "compiled")

_GRADIENT = "gradient of "


def compare(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
    stages: Collection[str] | None = None,
    options: CompileOptions | dict[str, Any] | None = None,
    passes: Sequence[AnyPass] = (),
) -> ComparisonReport:
    """Compare the results of each stage of compilation with eager PyTorch.

    The stages are the captured program, the imported Relax module, the module after each pass that
    changes it, and the compiled code. Each stage runs in the module's own dtype and in float64,
    with the same numbers. :mod:`tvmbridge.inspect.compare.verdict` explains how departures are
    judged. Random draws are those that the module would make now. The module, its buffers, its
    gradients and the state of the random generator are not changed.

    Args:
        module: any module, in the mode that it is to be compared in.
        sample_input: a tensor, or a tuple of positional arguments. Inputs that require a gradient
            have their gradients compared.
        sample_kwargs: keyword arguments of forward.
        backward: whether to compare the gradients of all parameters and inputs that require one.
        stages: the stages to evaluate, among ``"eager"``, ``"captured"``, ``"imported"``,
            ``"passes"`` and ``"compiled"``; None: all. Eager PyTorch always runs, as the reference.
        options: the options of the compilation.
        passes: passes of your own (:class:`tvmbridge.passes.base.RelaxPass`, or any function of an
            IRModule), which run after the pipeline's. Each is a stage with the pass's name.

    Returns:
        The report. If the module cannot be compared, ``ok`` is False and ``reason`` says why.

    Raises:
        TypeError: ``module`` is not a module, or ``options`` has an unknown field.
        ValueError: ``stages`` has an unknown name.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    unknown = set(STAGES if stages is None else stages) - set(STAGES)
    if unknown:
        raise ValueError(
            f"no stage is called {', '.join(sorted(unknown))}; choose among {', '.join(STAGES)}"
        )
    chosen = CompileOptions.of(options)
    args, kwargs = normalize_sample(sample_input, sample_kwargs)
    with torch.random.fork_rng(devices=[]):
        try:
            sample = Sample.of(module, args, kwargs)
        except Exception as error:
            return ComparisonReport.refused(f"the module cannot be copied: {error}")
        return Comparison(sample, backward, stages or STAGES, chosen, passes).run()


class Comparison:
    """A comparison in progress; see :func:`compare` for the arguments.

    - ``own``: the comparison in the module's own dtype.
    - ``wide``: the comparison in float64; None if the module is in float64 itself, or cannot run
      or be compiled in it.
    """

    def __init__(
        self,
        sample: Sample,
        backward: bool,
        stages: Collection[str],
        options: CompileOptions,
        passes: Sequence[AnyPass] = (),
    ) -> None:
        self.sample = sample
        self.backward = backward
        self.chosen = frozenset(stages)
        self.options = options
        self.passes = passes
        self.wide: Precision | None = None
        self.is_wide = not set(sample.dtypes) - {torch.float64}
        self.evaluated: list[str] = []
        self.figures: list[Figure] = []
        self.departures: list[Departure] = []
        self.notes: list[str] = []
        self._rounded: set[str] = set()

    def run(self) -> ComparisonReport:
        """Run the stages, compare them, and return the report."""
        try:
            self.own = Precision(self.sample, self.backward)
        except Exception as error:
            args, kwargs, _ = self.sample.arguments()
            advice = sample_advice(args, kwargs)
            return ComparisonReport.refused(
                f"forward refuses the sample: {_first(error)}; {advice}"
            )
        reason = ""
        try:
            if not self.is_wide:
                self._widen()
                self._compare_eager()
            if self.chosen != {"eager"}:
                self._lower()
                self._compare_stages()
        except BridgeError as error:
            reason = str(error)
        dtypes = self.sample.dtypes or [torch.get_default_dtype()]
        return ComparisonReport(
            dtype=str(dtypes[0]).removeprefix("torch."),
            stages=tuple(self.evaluated),
            values=tuple(dict.fromkeys(f.value for f in self.figures)),
            figures=tuple(self.figures),
            departures=tuple(self.departures),
            reason=reason,
            notes=tuple(self.notes),
        )

    def _widen(self) -> None:
        """Run eager PyTorch in float64."""
        try:
            self.wide = Precision(self.sample.in_float64(), self.backward)
        except Exception as error:
            self.notes.append(f"the module does not run in float64: {_first(error)}")
            return
        if self.wide.reference.unit > torch.finfo(torch.float64).eps:
            self.notes.append(
                "parts of the module compute in a lower precision even when it is float64, so "
                "the bounds in float64 are wide"
            )

    def _lower(self) -> None:
        names = self.own.reference.trace.results
        needs_grad = self.backward and any(n.startswith(_GRADIENT) for n in names)
        self.own.lowering = Lowering(self.sample, needs_grad, self.options, self.passes)
        derivation, options = self.own.lowering.lowered.derivation, self.options
        if derivation is not None:
            options = replace(options, joint=derivation.source)
            if derivation.reason:
                self.notes.append(f"joint by PyTorch's own derivatives: {derivation.reason}")
        if self.wide is not None:
            try:
                self.wide.lowering = Lowering(self.wide.sample, needs_grad, options, self.passes)
            except BridgeError as error:
                self.notes.append(f"not compared in float64: {error}")
                self.wide = None

    @property
    def _precisions(self) -> list[Precision]:
        return [self.own] if self.wide is None else [self.own, self.wide]

    # The stages ----------------------------------------------------------------------------------

    def _compare_eager(self) -> None:
        """Measure how far eager PyTorch in the module's dtype departs from float64."""
        if self.wide is None:
            return
        self.evaluated.append("eager")
        own, wide = self.own.reference, self.wide.reference
        for name, measure in own.measures.items():
            value, exact = own.trace.result(name), wide.trace.result(name)
            if name in own.unwritten or value is None or exact is None:
                continue
            error, bound64 = measure.departure(value, exact.to(value.dtype)), wide.bound(name)
            kind = ROUNDING if error > 0 else AGREES
            self.figures.append(Figure(name, "eager", error, measure.bound, 0.0, bound64, kind))

    def _compare_stages(self) -> None:
        others = {} if self.wide is None else {s.name: s for s in self.wide.lowering.stages}
        for stage in self.own.lowering.stages:
            other = others.get(stage.name)
            changed = stage.changed or (other is not None and other.changed)
            if stage.group not in self.chosen or not changed:
                continue
            for precision, part in zip(self._precisions, (stage, other), strict=False):
                precision.now = None
                try:
                    precision.now = None if part is None else precision.lowering.run(part)
                except Exception as error:
                    self.notes.append(f"stage {stage.name} cannot be evaluated: {_first(error)}")
            self._compare(stage.name)
        if "compiled" in self.chosen:
            for precision in self._precisions:
                precision.code = CompiledCode(precision.lowering, self.options)
                precision.now = precision.code.run()
            self._compare("compiled")

    def _compare(self, stage: str) -> None:
        if self.own.now is None:
            return
        self.evaluated.append(stage)
        for name in self._expected(self.own.now):
            self._compare_value(stage, name)
        for precision in self._precisions:
            precision.settle()

    def _expected(self, trace: Trace) -> list[str]:
        """Return the values that a stage must have; gradients only if it has any gradient."""
        reference = self.own.reference
        names = [n for n in reference.measures if n not in reference.unwritten]
        names = list(dict.fromkeys([*names, *trace.results]))
        has_gradients = any(n.startswith(_GRADIENT) for n in trace.results)
        return [n for n in names if has_gradients or not n.startswith(_GRADIENT)]

    def _compare_value(self, stage: str, name: str) -> None:
        wrong, wide = self.own, self.wide
        error, bound, new = wrong.judge(name)
        error64, bound64 = (error, bound) if self.is_wide else (None, None)
        size, least = error, bound
        if wide is not None and wide.now is not None:
            error64, bound64, new64 = wide.judge(name)
            new = new or new64
            if error64 > bound64:
                wrong, size, least = wide, error64, bound64
        kind = verdict(error, bound, error64 or 0.0, bound64 or 0.0)
        figure = Figure(name, stage, error, bound, error64, bound64, kind)
        self.figures.append(figure)
        if kind == MISTAKE and new:
            # Rounded up to a power of ten, so that values of one stage share a Matching.
            between = math.sqrt(min(1.0, size) * max(least, 1e-16))
            self._depart(wrong, figure, 10.0 ** math.ceil(math.log10(between)))
        elif kind == ROUNDING and name not in self._rounded:
            self._rounded.add(name)
            self._depart(self.own, figure, 0.0)

    def _depart(self, wrong: Precision, figure: Figure, tolerance: float) -> None:
        name, becomes = figure.value, ""
        operator, source = "compiled code", ""
        try:
            if figure.stage == "compiled":
                operator, source, becomes = wrong.locate_kernel(name, tolerance, figure.verdict)
            else:
                operator, source, becomes = wrong.locate(name, tolerance)
        except Exception as error:
            self.notes.append(f"the operator behind {name} was not found: {_first(error)}")
        errors = (figure.error, figure.error_float64)
        self.departures.append(
            Departure(name, figure.stage, operator, source, figure.verdict, *errors, becomes)
        )


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {first_paragraph(error)}"

"""One precision of a comparison: the departures of its stages from its own eager reference."""

from __future__ import annotations

import math

from tvmbridge.inspect.compare.compiled import CompiledCode
from tvmbridge.inspect.compare.locate import Finding, Matching, source_of
from tvmbridge.inspect.compare.reference import run_eager
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.stages import Lowering
from tvmbridge.inspect.compare.trace import Trace, TraceStep
from tvmbridge.inspect.compare.verdict import ROUNDING


class Precision:
    """One of the two precisions of a comparison.

    - ``sample``: the module and its arguments in this precision.
    - ``reference``: the results of eager PyTorch in this precision.
    - ``lowering``: the stages of compilation.
    - ``code``: the compiled code.
    - ``now``: the trace of the present stage; None if it could not be run.
    """

    lowering: Lowering
    code: CompiledCode
    now: Trace | None = None

    def __init__(self, sample: Sample, backward: bool) -> None:
        self.sample = sample
        self.reference = run_eager(sample, backward=backward)
        # For each result, the trace of the last stage that has it.
        self._before = dict.fromkeys(self.reference.trace.results, self.reference.trace)
        self._matchings: dict[tuple[float, int], Matching] = {}

    def settle(self) -> None:
        """Keep the results of the present stage as those before the next stage."""
        if self.now is not None:
            self._before.update(dict.fromkeys(self.now.results, self.now))
        self._matchings.clear()

    def judge(self, name: str) -> tuple[float, float, bool]:
        """Return a value's departure, its bound, and whether the present stage introduces it."""
        assert self.now is not None
        measure, before = self.reference.measures.get(name), self._before.get(name)
        if measure is None:
            return math.inf, 0.0, True
        value = self.now.result(name)
        step = math.inf if before is None else measure.departure(value, before.result(name))
        return measure.departure(value), measure.bound, step > measure.bound

    def locate(self, name: str, tolerance: float) -> tuple[str, str, str]:
        """Return the operator that the present stage gets wrong, its source and its replacement."""
        assert self.now is not None
        before = self._before.get(name, self.reference.trace)
        key = tolerance, id(before)
        if key not in self._matchings:
            self._matchings[key] = Matching(before, self.now, tolerance)
        finding: Finding = self._matchings[key].locate(name)
        source = self._source(finding.before, tolerance) or finding.source
        return finding.operator, source, finding.becomes

    def locate_kernel(self, name: str, tolerance: float, verdict: str) -> tuple[str, str, str]:
        """Return the wrong operator in compiled code, its source, and the kernels of the value.

        Operators are compiled one by one for mistakes only, and not for rounding.
        """
        step = None if verdict == ROUNDING else self.code.departing(name, tolerance)
        operator = "compiled code" if step is None else step.operator
        return operator, self._source(step, max(tolerance, 1e-9)), self.code.kernels(name)

    def _source(self, step: TraceStep | None, tolerance: float) -> str:
        """Return the user's source line of a step, from the captured program if necessary."""
        if step is None or step.source:
            return "" if step is None else step.source
        try:
            return source_of(step, self.lowering.program, tolerance)
        except Exception:
            return ""  # the captured program cannot be run

"""One precision of a comparison: how far its stages are from eager PyTorch in that precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvmbridge.core.options import CompileOptions
from tvmbridge.inspect.compare.compiled import CompiledCode
from tvmbridge.inspect.compare.locate import Finding, Matching
from tvmbridge.inspect.compare.reference import run_eager
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.stages import Lowering, Stage
from tvmbridge.inspect.compare.trace import Trace
from tvmbridge.pipeline import AnyPass


class Precision:
    """One of the two precisions: its reference, its stages, and what was run last (``now``)."""

    lowering: Lowering
    code: CompiledCode

    def __init__(self, sample: Sample, backward: bool) -> None:
        self.sample = sample
        self.reference = run_eager(sample, backward=backward)
        self.now: Trace | None = None
        # For each result the last stage that has it.
        self._before = dict.fromkeys(self.reference.trace.results, self.reference.trace)
        self._matchings: dict[tuple[float, int], Matching] = {}

    def lower(self, needs_grad: bool, options: CompileOptions, passes: Sequence[AnyPass]) -> None:
        """Make the graphs; raises as :class:`Lowering`."""
        self.lowering = Lowering(self.sample, needs_grad, options, passes)

    def run(self, stage: Stage | None) -> None:
        """Go on to a stage."""
        self.now = None
        if stage is not None:
            self.now = self.lowering.run(stage)

    def run_compiled(self, options: CompileOptions) -> None:
        """Build the code, and go on to it."""
        self.code = CompiledCode(self.lowering, options)
        self.now = self.code.run()

    def settle(self) -> None:
        """The present stage becomes the stage before."""
        if self.now is not None:
            self._before.update(dict.fromkeys(self.now.results, self.now))
        self._matchings.clear()

    def departure(self, name: str) -> float:
        """How far the present value is from the reference."""
        measure = self.reference.measures.get(name)
        if measure is None or self.now is None:
            return math.inf
        return measure.departure(self.now.result(name))

    def is_new(self, name: str) -> bool:
        """Whether a departure comes in with the present stage, not with one before."""
        if self.now is None:
            return False
        measure, before = self.reference.measures.get(name), self._before.get(name)
        if measure is None or before is None:
            return True
        return measure.departure(self.now.result(name), before.result(name)) > measure.bound

    def bound(self, name: str) -> float:
        """What rounding explains of a departure."""
        measure = self.reference.measures.get(name)
        return 0.0 if measure is None else measure.bound

    def locate(self, name: str, tolerance: float) -> Finding:
        """The operator that the present stage gets wrong for ``name``."""
        assert self.now is not None
        before = self._before.get(name, self.reference.trace)
        key = tolerance, id(before)
        if key not in self._matchings:
            self._matchings[key] = Matching(before, self.now, tolerance)
        return self._matchings[key].locate(name)

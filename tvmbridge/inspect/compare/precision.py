"""One precision of a comparison: how far its stages are from eager PyTorch in that precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tvmbridge.core.options import CompileOptions
from tvmbridge.inspect.compare.eager import Reference, run_eager
from tvmbridge.inspect.compare.locate import Finding, Matching
from tvmbridge.inspect.compare.machine import CompiledCode
from tvmbridge.inspect.compare.route import Route
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.trace import Trace
from tvmbridge.inspect.compare.verdict import Measure
from tvmbridge.pipeline import AnyPass


@dataclass
class Precision:
    """One of the two precisions: its reference, its graphs, and what was evaluated last."""

    sample: Sample
    reference: Reference
    measures: dict[str, Measure]
    route: Route | None = None
    code: CompiledCode | None = None
    now: Trace | None = None
    captured: Trace | None = None
    before: dict[str, Trace] = field(default_factory=dict)
    matchings: dict[float, dict[int, Matching]] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: Sample, backward: bool) -> Precision:
        """Run the reference."""
        reference = run_eager(sample, backward=backward)
        eps = unit_of(reference.trace)
        measures = {
            name: Measure.of(reference.trace.steps[number].value, reference.noise[name], eps)
            for name, number in reference.trace.results.items()
        }
        made = cls(sample, reference, measures)
        made.before = dict.fromkeys(reference.trace.results, reference.trace)
        return made

    def lower(self, needs_grad: bool, options: CompileOptions, passes: Sequence[AnyPass]) -> None:
        """Make the graphs; raises as :meth:`Route.of`."""
        self.route = Route.of(
            self.sample, self.reference, needs_grad=needs_grad, options=options, passes=passes
        )

    def departure(self, name: str) -> float:
        """How far the present value is from the reference."""
        value = None if self.now is None else self.now.result(name)
        measure = self.measures.get(name)
        return math.inf if measure is None else measure.departure(value)

    def step(self, name: str) -> float:
        """How far the present value is from that of the stage before."""
        measure, before = self.measures.get(name), self.before.get(name)
        if self.now is None or measure is None or before is None:
            return math.inf
        return measure.departure(self.now.result(name), before.result(name))

    def bound(self, name: str) -> float:
        """What rounding explains of a departure."""
        measure = self.measures.get(name)
        return 0.0 if measure is None else measure.bound

    def locate(self, name: str, tolerance: float) -> Finding:
        """The operator that the present stage gets wrong for ``name``."""
        before, now = self.before.get(name), self.now
        assert now is not None
        if before is None:
            before = self.reference.trace
        known = self.matchings.setdefault(tolerance, {})
        if id(before) not in known:
            known[id(before)] = Matching(before, now, tolerance)
        return known[id(before)].locate(name)

    def settle(self) -> None:
        """The present stage becomes the stage before."""
        assert self.now is not None
        self.before.update(dict.fromkeys(self.now.results, self.now))
        self.matchings.clear()


def unit_of(trace: Trace) -> float:
    """The largest unit of rounding among the computed values."""
    computed = [s.value for s in trace.steps if not s.is_input and s.value.is_floating_point()]
    return max((torch.finfo(v.dtype).eps for v in computed), default=0.0)

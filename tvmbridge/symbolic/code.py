"""Symbolic code: a module is compiled at a few sizes and generalised to all sizes in between.

The module is lowered and scheduled at several points, with the same decisions. The results are
generalised (:mod:`.generalize`, :mod:`.descriptions`) and compiled once. If the results differ in
more than numbers, there is no symbolic code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from torch import nn

from tvmbridge.compiler.build import Built
from tvmbridge.compiler.compiled import CompiledModule, assembled, copied_results
from tvmbridge.compiler.durations import StageDurations
from tvmbridge.compiler.laying_out import Layouts, lay_out_functions
from tvmbridge.compiler.lowering import Known, LoweredModule, lower_module
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.partial_backwards import NoPartialBackwards
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.assumptions import Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.captured_graph import Assumptions, CapturedGraph
from tvmbridge.core.decisions import recorded_decisions, repeated_decisions
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.graph_capture.any_size import SymbolicTrace
from tvmbridge.graph_capture.relations import Relations
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.symbolic.building import build_for_all
from tvmbridge.symbolic.descriptions import at, merged
from tvmbridge.symbolic.sizes import DifferentCodeError, Point, Sizes

_NO_ASSUMPTIONS = Assumptions(training=False)
_NO_GRAPH: Any = None


@dataclass(frozen=True)
class Points:
    """The points at which a module is compiled; each is a tuple with the value of each symbol.

    - ``least``, ``most``: the smallest and the largest point that the code is for.
    - ``middle``: a point with common sizes, whose decisions the others repeat.
    - ``between``: further corners of the box from ``least`` to ``most``.
    """

    least: Point
    most: Point
    middle: Point
    between: tuple[Point, ...] = ()

    @property
    def all(self) -> tuple[Point, ...]:
        """Return all points: the middle first, the largest second, and the smallest last."""
        return (self.middle, self.most, *self.between, self.least)

    def hold(self, point: Sequence[int]) -> bool:
        """Whether ``point`` is within the range of these points."""
        bounds = zip(self.least, point, self.most, strict=True)
        return all(low <= size <= high for low, size, high in bounds)


@dataclass(frozen=True)
class _Described:
    """The data about a compiled module that may differ between sizes only in numbers.

    - ``captured``: the captured graph.
    - ``split``: forward and backward as separate functions; None in inference.
    - ``layouts``: the strides of results that eager PyTorch does not return contiguous.
    - ``num_outputs``: the number of outputs of forward.
    - ``packs``: the names of the parameters in each packed weight.
    - ``joint``: the source text of the joint function (forward and gradients); None in inference.
    """

    captured: CapturedGraph
    split: SplitModule | None
    layouts: Layouts
    num_outputs: int
    packs: tuple[tuple[str, ...], ...]
    joint: str | None


@dataclass(frozen=True)
class _Lowered:
    lowered: LoweredModule
    mod: tvm.IRModule
    parts: SplitModule | None
    described: _Described


@dataclass(frozen=True, eq=False)
class SymbolicCode:
    """Code for all sizes within a range.

    - ``points``: the points at which it was compiled, which bound the range.
    - ``relations``: conditions that sizes must fulfil in addition.
    - ``compiled``: the compiled module at one of the points.
    """

    points: Points
    relations: Relations
    compiled: CompiledModule
    _described: _Described = field(repr=False)

    def at(self, point: Point) -> CompiledModule:
        """Return the compiled module for the sizes ``point``; all share one executable."""
        described = at(self._described, point)
        whole = self.compiled.captured
        captured = replace(described.captured, program=whole.program, assumptions=whole.assumptions)
        return replace(
            self.compiled,
            captured=captured,
            split=described.split,
            layouts=described.layouts,
            loaded=self.compiled.loaded.at(point),
        )


def compile_symbolic(
    module: nn.Module,
    sample_at: Callable[[Point], tuple[tuple[Any, ...], dict[str, Any]]],
    points: Points,
    trace: SymbolicTrace,
    *,
    needs_grad: bool,
    target: Any,
    options: CompileOptions,
    packing: ModulePacks | None,
    autocast: Autocast = (),
) -> SymbolicCode:
    """Compile ``module`` for all sizes in the range of ``points``.

    Args:
        module: the module.
        sample_at: returns arguments with the sizes of a point.
        points: the points at which to compile; all must fulfil the trace's relations.
        trace: the module traced with symbols.
        needs_grad, target, options, packing, autocast: see
            :func:`~tvmbridge.compiler.compiled.compile_module`.

    Raises:
        DifferentCodeError: the code at the points differs in more than numbers.
        BridgeError: the module cannot be compiled; see ``compile_module``.
    """
    stages, records = StageDurations(), list[PassRecord]()

    def lower(point: Point, known: Known) -> _Lowered:
        args, kwargs = sample_at(point)
        lowered = lower_module(
            module,
            args,
            kwargs,
            needs_grad=needs_grad,
            target=target,
            options=options,
            records=records,
            measure=stages.measure,
            packing=packing,
            autocast=autocast,
            known=known,
        )
        return _laid_out(lowered, records)

    first, *others = points.all
    with recorded_decisions() as decisions:
        lowered = [lower(first, Known(trace.stage_of_all))]
    for point in others:
        known = _known(trace, lowered[0].lowered, sample_at(first), sample_at(point))
        with repeated_decisions(decisions):
            lowered.append(lower(point, known))
    sizes = Sizes(points.all)
    common = lowered[0]
    with stages.measure("build"):
        assumptions = _together([each.lowered.captured.assumptions for each in lowered])
        described = _merged(lowered, sizes)
        built = build_for_all(
            [(e.mod, None if e.parts is None else e.parts.bundle) for e in lowered],
            sizes,
            common.lowered.target,
            options,
            common.lowered.captured.device,
            records,
        )
        _refuse_other_copies(lowered, built)
    compiled = assembled(common.lowered, common.mod, common.parts, built, records, stages)
    compiled = replace(
        compiled,
        captured=replace(compiled.captured, assumptions=assumptions),
        partial_backwards=None if common.parts is None else NoPartialBackwards(),
    )
    return SymbolicCode(points, trace.relations, compiled, described)


def _known(trace: SymbolicTrace, first: LoweredModule, there: Arguments, here: Arguments) -> Known:
    """Return results of the ``first`` compilation that need not be computed again for ``here``.

    ``first`` was lowered for the arguments ``there``; ``here`` are arguments of other sizes.
    """
    captured = trace.captured(first.captured, there, here)
    derivation = first.derivation
    if captured is None or derivation is None or derivation.layouts:
        return Known(trace.stage_of_all, captured)
    return Known(trace.stage_of_all, captured, derivation.facts)


def _laid_out(lowered: LoweredModule, records: list[PassRecord]) -> _Lowered:
    captured = lowered.captured
    if captured.prologue is not None or captured.epilogue is not None:
        raise DifferentCodeError("a part of it runs eagerly, which is compiled for one size")
    mod, parts = lay_out_functions(lowered.mod, lowered.split, lowered.layouts, records)
    if parts is not None and parts.functions:
        raise DifferentCodeError("it has a backward of its own, which is compiled for one size")
    described = _Described(
        captured=captured,
        split=parts,
        layouts=lowered.layouts,
        num_outputs=lowered.num_outputs,
        packs=tuple(map(tuple, lowered.packs)),
        joint=None if lowered.derivation is None else lowered.derivation.source,
    )
    return _Lowered(lowered, mod, parts, described)


def _merged(lowered: Sequence[_Lowered], sizes: Sizes) -> _Described:
    """Merge the descriptions at all points into one with symbolic sizes."""
    same: list[_Described] = []
    for described in (each.described for each in lowered):
        # Graphs and assumptions are left out: building generalises the graphs, and _together
        # merges the assumptions.
        captured = replace(described.captured, program=_NO_GRAPH, assumptions=_NO_ASSUMPTIONS)
        parts = described.split
        if parts is not None:
            parts = replace(parts, mod=_NO_GRAPH)
        same.append(replace(described, captured=captured, split=parts))
    return merged(same, sizes, "module")


def _refuse_other_copies(lowered: Sequence[_Lowered], built: Built) -> None:
    """Raise a DifferentCodeError if different results share memory at some sizes."""
    copied = [copied_results(e.lowered, e.parts, built.shared) for e in lowered]
    if any(other != copied[0] for other in copied[1:]):
        raise DifferentCodeError("at other sizes, other results share memory")


def _together(all_: Sequence[Assumptions]) -> Assumptions:
    """Merge the assumptions of all compilations: what forward reads at any size is guarded.

    Raises:
        DifferentCodeError: forward has read other values or taken other branches at some size.
    """
    first = all_[0]
    for other in all_[1:]:
        answers = [[(x.names, x.value) for x in each.answers] for each in (first, other)]
        if answers[0] != answers[1] or first.normed != other.normed:
            raise DifferentCodeError("forward asks something else at other sizes")
        if first.is_compiling != other.is_compiling:
            raise DifferentCodeError("forward goes another way at other sizes")
    return replace(
        first,
        values={k: v for each in reversed(all_) for k, v in each.values.items()},
        outside=tuple({o.key: o for each in reversed(all_) for o in each.outside}.values()),
        foreign=tuple({id(t): t for each in all_ for t in each.foreign}.values()),
        asks=frozenset[Question]().union(*(each.asks for each in all_)),
    )

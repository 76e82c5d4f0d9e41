"""Symbolic code: one compilation of a module for all sizes in a range.

The module is lowered and scheduled at several points (values of the symbols), with the same
decisions. The results are generalized (:mod:`.generalize`, :mod:`.descriptions`) and compiled
once. If they differ in more than numbers, there is no symbolic code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import tvm
from torch import fx, nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.compiler.build import Built
from tvmbridge.compiler.compiled import CompiledModule, assembled, copied_results
from tvmbridge.compiler.durations import StageDurations
from tvmbridge.compiler.laying_out import Layouts, lay_out_functions
from tvmbridge.compiler.lowering import Known, LoweredModule, lower_module
from tvmbridge.compiler.partial_backwards import NoPartialBackwards
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.assumptions import Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.captured_graph import Assumptions, CapturedGraph
from tvmbridge.core.decisions import (
    Decision,
    OtherFactError,
    Results,
    padding_by_sizes,
    recorded_decisions,
    repeated_decisions,
    without_facts,
)
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import PassRecord
from tvmbridge.frontend.origins import user_source
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of, traced_with_symbols
from tvmbridge.graph_capture.relations import Relations
from tvmbridge.symbolic.building import build_for_all, refused_as_different
from tvmbridge.symbolic.descriptions import at, merged, same_tensor
from tvmbridge.symbolic.eager_parts import EagerParts, described_parts, with_parts
from tvmbridge.symbolic.points import Points
from tvmbridge.symbolic.reaching import Reach
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.sizes import DifferentCodeError, Sizes
from tvmbridge.symbolic.symbols import LEAST_SIZE, Symbols

_NO_ASSUMPTIONS = Assumptions(training=False)
_NO_GRAPH: Any = None


@dataclass(frozen=True)
class _Described:
    """The description of a compiled module, which may differ between points only in numbers."""

    captured: CapturedGraph
    eager: EagerParts
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
    """Code for all sizes in the range of ``points`` that satisfy the ``relations``.

    - ``points``: the points at which the module was compiled; the least and largest sizes are those
      that the code serves.
    - ``trace``: the module with symbols, with the relations between sizes that forward assumes.
    - ``compiled``: the code, with the descriptions of one point.
    """

    points: Points
    trace: SymbolicTrace
    compiled: CompiledModule
    _described: _Described = field(repr=False)

    @property
    def relations(self) -> Relations:
        """The relations between sizes that forward assumes."""
        return self.trace.relations

    def at(self, point: Point) -> CompiledModule:
        """Return the code for one point; it shares the executable."""
        described = at(self._described, point)
        whole = self.compiled.captured
        captured = replace(described.captured, program=whole.program, assumptions=whole.assumptions)
        captured = with_parts(captured, whole, described.eager)
        return replace(
            self.compiled,
            captured=captured,
            split=described.split,
            layouts=described.layouts,
            loaded=self.compiled.loaded.at(point),
        )


class _HasLowered(Protocol):
    """What comes of a lowered module, with the module itself."""

    @property
    def lowered(self) -> LoweredModule: ...


_Made = TypeVar("_Made", bound=_HasLowered)


def traced_for(
    module: nn.Module,
    symbols: Symbols,
    sample: Arguments,
    *,
    needs_grad: bool,
    apart: bool = True,
    autocast: Autocast,
    like: Sequence[Decision] | None = None,
) -> SymbolicTrace:
    """Trace ``module`` with ``symbols`` in place of some sizes of ``sample``.

    Args:
        apart: trace a copy of the module; False: trace the module itself.
        like: the decisions of another trace, which are repeated; None: the sample decides.

    Raises:
        CaptureError: the module cannot be traced with these symbols.
    """

    def traced_at(point: Point) -> SymbolicTrace:
        with recorded_decisions() if like is None else repeated_decisions(like) as decisions:
            trace = traced_with_symbols(
                module,
                *symbols.probe(*sample, point),
                symbols.all_dimensions,
                needs_grad=needs_grad,
                apart=apart,
                autocast=autocast,
            )
        return replace(trace, decisions=tuple(decisions or ()))

    here, point = symbols.point_of(shapes_of(sample)), symbols.apart(shapes_of(sample))
    try:
        return traced_at(point)
    except CaptureError:
        # Forward may demand that sizes are equal which were not equal in all calls.
        if point == here or min(here) < LEAST_SIZE:
            raise
        return traced_at(here)


def lowered_at_all(
    points: Points,
    trace: SymbolicTrace,
    sample_at: Callable[[Point], Arguments],
    lower: Callable[[Point, Known], _Made],
) -> list[_Made]:
    """Lower a module at each of ``points``, with the decisions of the first.

    Args:
        trace: the module with symbols, which the graphs at the other points come from.
        lower: lowers the module at a point, with what is known of it.

    A fact that simplifies the code at the first point alone, such as that a window's mask is
    causal, is then not used.

    Raises:
        DifferentCodeError: the module is refused at a point, and not at the first.
        BridgeError: the module is refused at the first point.
    """
    try:
        return _lowered_alike(points, trace, sample_at, lower)
    except OtherFactError:
        with without_facts():
            return _lowered_alike(points, trace, sample_at, lower)


def _lowered_alike(
    points: Points,
    trace: SymbolicTrace,
    sample_at: Callable[[Point], Arguments],
    lower: Callable[[Point, Known], _Made],
) -> list[_Made]:
    """Lower a module at each of ``points``, and raise OtherFactError if a fact differs."""
    first, *others = points.all
    made: Results = {}
    with padding_by_sizes(_pads_by_sizes(trace)):
        with recorded_decisions(results=made) as decisions:
            lowered = [lower(first, Known(trace.stage_at(sample_at(first))))]
        for point in others:
            known = _known(trace, lowered[0].lowered, sample_at(first), sample_at(point))
            with refused_as_different(), repeated_decisions(decisions, made):
                lowered.append(lower(point, known))
    return lowered


def _pads_by_sizes(trace: SymbolicTrace) -> bool:
    """Whether a constant padding in ``trace`` has amounts that depend on sizes."""
    padding = torch.ops.aten.constant_pad_nd.default
    return any(
        isinstance(argument, fx.Node | torch.SymInt)
        for node in trace.program.graph.nodes
        if node.target is padding
        for argument in pytree.tree_leaves(node.args[1])
    )


def compile_symbolic(
    request: CompileRequest,
    symbols: Symbols,
    points: Points,
    trace: SymbolicTrace,
    floors: Point | None = None,
) -> SymbolicCode:
    """Compile a module for all sizes that ``points`` hold.

    Args:
        request: the module, with arguments of some size.
        symbols: the symbolic dimensions of the arguments.
        points: the sizes that it is compiled at; all of them must fulfil its relations.
        trace: the module with symbols.
        floors: the least sizes, because code for smaller ones differs; None: those that the loops
            serve.

    Raises:
        DifferentCodeError: the code at the points differs in more than sizes.
        BridgeError: an error that ``compile_module`` raises.
    """
    stages, records = StageDurations(), list[PassRecord]()
    sample_at = partial(symbols.probe, request.args, request.kwargs)

    def lower(point: Point, known: Known) -> _Lowered:
        args, kwargs = sample_at(point)
        here = replace(request, args=args, kwargs=kwargs)
        lowered = lower_module(here, records=records, measure=stages.measure, known=known)
        return _laid_out(lowered, records)

    lowered = lowered_at_all(points, trace, sample_at, lower)
    sizes = points.sizes(with_ones=floors is None)
    common = lowered[0]
    with stages.measure("build"):
        assumptions = _together([each.lowered.captured.assumptions for each in lowered])
        _refuse_other_constants([each.lowered.captured for each in lowered])
        described = _merged(lowered, sizes)
        built = build_for_all(
            [(e.mod, None if e.parts is None else e.parts.bundle) for e in lowered],
            sizes,
            common.lowered.target,
            request.options,
            common.lowered.captured.device,
            records,
            Reach(trace, symbols, (request.args, request.kwargs), points, [None] * sizes.symbols),
        )
        _refuse_other_copies(lowered, built)
    compiled = assembled(common.lowered, common.mod, common.parts, built, records, stages)
    compiled = replace(
        compiled,
        captured=replace(compiled.captured, assumptions=assumptions),
        partial_backwards=None if common.parts is None else NoPartialBackwards(),
    )
    points = replace(points, least=built.least if floors is None else points.least, most=built.most)
    return SymbolicCode(points, trace, compiled, described)


def _known(trace: SymbolicTrace, first: LoweredModule, there: Arguments, here: Arguments) -> Known:
    """Return results for the arguments ``there`` that are valid for the arguments ``here`` too."""
    stage, captured = trace.stage_at(here), trace.captured(first.captured, there, here)
    derivation = first.derivation
    if captured is None or derivation is None or derivation.layouts:
        return Known(stage, captured)
    return Known(stage, captured, derivation.facts)


def _laid_out(lowered: LoweredModule, records: list[PassRecord]) -> _Lowered:
    mod, parts = lay_out_functions(lowered.mod, lowered.split, lowered.layouts, records)
    if parts is not None and parts.functions:
        raise DifferentCodeError("it has a backward of its own, which is compiled for one size")
    described = _Described(
        captured=lowered.captured,
        eager=described_parts(lowered.captured),
        split=parts,
        layouts=lowered.layouts,
        num_outputs=lowered.num_outputs,
        packs=tuple(map(tuple, lowered.packs)),
        joint=None if lowered.derivation is None else lowered.derivation.source,
    )
    return _Lowered(lowered, mod, parts, described)


def _merged(lowered: Sequence[_Lowered], sizes: Sizes) -> _Described:
    """Return the description of the module for any size."""
    same: list[_Described] = []
    for described in (each.described for each in lowered):
        # The graphs are generalized when they are built, so the description needs none.
        captured = replace(
            described.captured,
            program=_NO_GRAPH,
            assumptions=_NO_ASSUMPTIONS,
            prologue=None,
            epilogue=None,
        )
        parts = described.split
        if parts is not None:
            parts = replace(parts, mod=_NO_GRAPH)
        same.append(replace(described, captured=captured, split=parts))
    return merged(same, sizes, "module")


def _refuse_other_constants(graphs: Sequence[CapturedGraph]) -> None:
    """Raise DifferentCodeError if a tensor that forward makes of numbers depends on the size."""
    first, *others = graphs
    for name, tensor in first.constant_tensors.items():
        held = [other.constant_tensors.get(name) for other in others]
        if not all(found is not None and same_tensor(tensor, found) for found in held):
            raise DifferentCodeError(
                f"at other sizes forward makes a tensor of other numbers{_made_at(first, name)}; "
                "x.new_full((), size) makes it in code for any size"
            )


def _made_at(captured: CapturedGraph, name: str) -> str:
    """Return the line of forward that reads the constant tensor ``name`` first, if it is known."""
    (node,) = (n for n in captured.program.graph.nodes if n.name == name)
    sources = (user_source(user.meta.get("stack_trace")) for user in node.users)
    return next((f" at {source}" for source in sources if source), "")


def _refuse_other_copies(lowered: Sequence[_Lowered], built: Built) -> None:
    """Raise DifferentCodeError if the results that share memory depend on the size."""
    copied = [copied_results(e.lowered, e.parts, built.shared) for e in lowered]
    if any(other != copied[0] for other in copied[1:]):
        raise DifferentCodeError("at other sizes, other results share memory")


def _together(all_: Sequence[Assumptions]) -> Assumptions:
    """Combine the assumptions of all points: guards watch each value that forward reads at any.

    Raises:
        DifferentCodeError: forward computed other values from buffers, or branched otherwise.
    """
    first = all_[0]
    if any(not answer.names for each in all_ for answer in each.answers):
        raise DifferentCodeError("forward branches by values of arguments, or of what it creates")
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

"""Compilation of one module for one signature and mode, from capture to loaded code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import tvm

from tvmbridge.compiler.buffers import Reuse
from tvmbridge.compiler.build import Built
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.compiler.combining import Packs
from tvmbridge.compiler.durations import StageDurations
from tvmbridge.compiler.executable import Bound, LoadedModule
from tvmbridge.compiler.freezing import Freezing, freeze
from tvmbridge.compiler.laying_out import Layouts, lay_out_functions, put_on
from tvmbridge.compiler.lowering import LoweredModule, lower_module
from tvmbridge.compiler.partial_backwards import NoPartialBackwards, PartialBackwards
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord, ValueDescriptor
from tvmbridge.graph_capture.memory.layouts import Strides
from tvmbridge.passes.relax.remove_borders import RemoveBorders
from tvmbridge.passes.relax.return_whole import ReturnWhole, wholes_of
from tvmbridge.pipeline import run_passes, tidy_passes
from tvmbridge.records import Coverage
from tvmbridge.records.pending import note_missing

# Graphs, the records of passes and how residuals are bundled, to code.
Building: TypeAlias = Callable[..., Built]


@dataclass(frozen=True)
class CompiledModule:
    """Loaded code of one module for one signature and mode.

    ``loaded`` has ``forward(primals...) -> (outputs...)``; when ``split`` is not None,
    ``forward(primals...) -> (outputs..., residuals)`` and ``backward(reads..., kept outputs...,
    residuals, cotangents...) -> (gradients...)``, where ``residuals`` is one tuple. Primals are the
    user inputs, the parameters and buffers, the draws, the dropout masks and the packed weights, in
    this order. ``packs`` are the names of the parameters in each packed weight.
    ``copied_outputs`` and ``copied_gradients`` are results that share memory with another tensor
    and must be copied before they are handed out. ``layouts`` are those of results that eager
    PyTorch does not return contiguous. ``joint`` names the source of the joint function (None where
    nothing is differentiated), ``joint_reason`` says why it is not ``relax``.
    ``recorded``: it serves calls that autograd records. ``origin`` is the class of the module.
    ``coverage`` counts the calls of kernels by where these come from. ``cache``: ``hit``, or why
    the code was compiled and not found on disk. ``key``: its name there, empty where it is not
    kept. ``partial_backwards``: those
    without some of the cotangents (None where ``split`` is None). ``cuda_graphs``: calls are
    replayed as CUDA graphs where that is safe. ``reuse``: the memory that the buffers of each
    function share, where its sizes are numbers. ``freezing``: what ``forward`` takes in place of
    the primals, where weights are frozen; else None.
    """

    captured: CapturedGraph
    recorded: bool
    origin: str
    packs: Packs
    split: SplitModule | None
    loaded: LoadedModule
    target: tvm.target.Target
    num_outputs: int
    copied_outputs: frozenset[int]
    copied_gradients: frozenset[int]
    layouts: Layouts
    joint: str | None
    joint_reason: str
    native_calls: Mapping[str, int]
    aten_calls: Mapping[str, int]
    coverage: Coverage
    records: tuple[PassRecord, ...]
    seconds: Mapping[str, float]
    partial_backwards: PartialBackwards | NoPartialBackwards | None = None
    cuda_graphs: bool = False
    cache: str = ""
    key: str = ""
    reuse: Mapping[str, Reuse] = field(default_factory=dict)
    freezing: Freezing | None = None

    def forward(
        self, primals: Sequence[Any], strides: Strides = None, bound: Bound | None = None
    ) -> list[Any]:
        """The outputs, with the sample's strides or with these, and behind them the residuals."""
        results = self.loaded.run("forward", primals, self.copied_outputs, bound)
        if self.layouts.outputs or strides:
            put_on(self.layouts.outputs, results, strides)
        return results

    def backward(self, values: Sequence[Any], bound: Bound | None = None) -> list[torch.Tensor]:
        """The gradients, laid out as in eager PyTorch."""
        gradients = self.loaded.run("backward", values, self.copied_gradients, bound)
        if self.layouts.gradients:
            put_on(self.layouts.gradients, gradients)
        return gradients

    def compile_no_more(self) -> None:
        """Have no backward compiled for its speed alone: most calls are served by other code."""
        if isinstance(self.partial_backwards, PartialBackwards):
            self.partial_backwards.for_speed = False

    @property
    def eager_functions(self) -> Mapping[str, int]:
        """What runs in eager PyTorch after the compiled code, counted by name."""
        return self.captured.epilogue.functions if self.captured.epilogue is not None else {}

    @property
    def residual_bytes(self) -> int:
        """Bytes that live for backward's sake; inputs, state and outputs are not counted."""
        return 0 if self.split is None else self.split.residual_bytes

    @property
    def residuals(self) -> tuple[ValueDescriptor, ...]:
        """What :attr:`residual_bytes` is made of, the largest first."""
        if self.split is None:
            return ()
        values = (*self.split.residuals, *self.split.drawn)
        return tuple(sorted(values, key=lambda v: -v.spec.nbytes))


def compile_module(
    request: CompileRequest, building: Callable[..., Building] = CachedBuild
) -> CompiledModule:
    """Compile a module for the arguments of a call.

    Args:
        request: the module and the arguments.
        building: given a target, the options and a device, returns what builds the graphs.

    Raises:
        NotApartError: forward reaches the module itself, so that no copy can be traced.
        CaptureError, UnsupportedOperatorError, PassError, BuildError: the stage that failed.
    """
    stages, options = StageDurations(), request.options
    records: list[PassRecord] = []
    if options.freeze:
        request = replace(request, packing=None)
    lowered = lower_module(request, records=records, measure=stages.measure)
    if not options.freeze:
        return build_lowered(lowered, options, records, stages, building)
    with stages.measure("passes"):
        lowered, freezing = freeze(lowered, options, records)
    return replace(build_lowered(lowered, options, records, stages, building), freezing=freezing)


def build_lowered(
    lowered: LoweredModule,
    options: CompileOptions,
    records: list[PassRecord],
    stages: StageDurations | None = None,
    building: Callable[..., Building] = CachedBuild,
) -> CompiledModule:
    """Build what :func:`lower_module` made and load it; arguments as of :func:`compile_module`.

    Raises:
        BuildError: TVM cannot compile it for the target.
    """
    stages = stages or StageDurations()
    mod, parts = lay_out_functions(lowered.mod, lowered.split, lowered.layouts, records)
    if parts is not None and parts.functions:
        mod = run_passes(mod, [RemoveBorders(), *tidy_passes()], records)
    mod = run_passes(mod, [ReturnWhole()], records)
    device = lowered.captured.device
    with stages.measure("build"):
        build = building(lowered.target, options, device)
        built = build(mod, records, None if parts is None else parts.bundle)
        if options.tuning_records:
            note_missing(built.missing, options.tuning_logs, lowered.target, lowered.origin)
    partial_backwards = None
    if parts is not None:
        partial_backwards = PartialBackwards(parts, build, lowered.layouts.gradients, device)
    return replace(
        assembled(lowered, mod, parts, built, records, stages),
        cuda_graphs=options.cuda_graphs and device.type == "cuda",
        partial_backwards=partial_backwards,
    )


def assembled(
    lowered: LoweredModule,
    mod: tvm.IRModule,
    parts: SplitModule | None,
    built: Built,
    records: list[PassRecord],
    stages: StageDurations,
) -> CompiledModule:
    """What was lowered, laid out (``mod``, ``parts``) and built, without partial backwards."""
    derivation, imported = lowered.derivation, lowered.imported
    copied_outputs, copied_gradients = copied_results(lowered, parts, built.shared)
    gradients = None
    if parts is not None and wholes_of(mod["backward"]):
        gradients = Pieces(mod["backward"])
        copied_gradients = gradients.places(copied_gradients)
    return CompiledModule(
        captured=lowered.captured,
        recorded=lowered.recorded,
        origin=lowered.origin,
        packs=lowered.packs,
        split=parts,
        loaded=LoadedModule(built.machine, built.unaligned, lowered.captured.device, gradients),
        target=lowered.target,
        num_outputs=lowered.num_outputs,
        copied_outputs=copied_outputs,
        copied_gradients=copied_gradients,
        layouts=lowered.layouts,
        joint=None if derivation is None else derivation.source,
        joint_reason="" if derivation is None else derivation.reason,
        native_calls=imported.native_calls,
        aten_calls=imported.aten_calls,
        coverage=built.coverage,
        cache=built.cache,
        key=built.key,
        reuse=built.reuse,
        records=tuple(records),
        seconds=stages.seconds,
    )


def copied_results(
    lowered: LoweredModule,
    parts: SplitModule | None,
    shared: Mapping[str, frozenset[int]],
) -> tuple[frozenset[int], frozenset[int]]:
    """Outputs, and gradients, that share memory with another tensor."""
    outputs = shared["forward"].intersection(range(lowered.num_outputs))
    return outputs, frozenset() if parts is None else shared["backward"]

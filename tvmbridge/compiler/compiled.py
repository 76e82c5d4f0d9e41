"""Compilation of one module for one signature and mode, from capture to loaded code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import tvm

from tvmbridge.backends import backend_of
from tvmbridge.calls.layouts import Strides
from tvmbridge.compiler.backward_code import BackwardLoader
from tvmbridge.compiler.bound import bound_entry
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
from tvmbridge.compiler.siblings import siblings_of
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import OutputKind, PassRecord, ValueDescriptor
from tvmbridge.passes.relax.remove_borders import RemoveBorders
from tvmbridge.passes.relax.return_padded import ReturnPadded
from tvmbridge.passes.relax.return_whole import ReturnWhole, wholes_of
from tvmbridge.pipeline import run_passes, tidy_passes
from tvmbridge.records import Coverage
from tvmbridge.records.pending import note_missing

# Called with the graphs, the list of pass records, and how residuals are bundled; returns code.
Building: TypeAlias = Callable[..., Built]


@dataclass(frozen=True)
class CompiledModule:
    """Loaded code of one module for one signature and mode.

    In inference, ``loaded`` has ``forward(primals...) -> (outputs...)``. In training it has
    ``forward(primals...) -> (outputs..., residuals)`` and ``backward(reads..., kept outputs...,
    residuals, cotangents...) -> (gradients...)``, where ``residuals`` is one tuple. Primals are, in
    this order: user inputs, parameters and buffers, random draws, dropout masks, packed weights.

    - ``captured``: the captured graph.
    - ``recorded``: whether the code serves calls that autograd records.
    - ``origin``: the name of the module's class.
    - ``packs``: for each packed weight (one tensor of several parameters), the parameters' names.
    - ``split``: the forward and backward graphs; None in inference.
    - ``copied_outputs``, ``copied_gradients``: numbers of results that share memory with another
      tensor, and are copied before the caller gets them.
    - ``layouts``: the layouts of results that are not contiguous in eager PyTorch.
    - ``joint``: the source of the joint function; None if nothing is differentiated.
    - ``joint_reason``: why the source is not ``relax``; otherwise empty.
    - ``native_calls``, ``aten_calls``: the number of operators that Relax code or calls of ATen
      compute, by name.
    - ``coverage``: the number of kernel calls, by the origin of the kernel.
    - ``seconds``: the duration of each compilation stage.
    - ``partial_backwards``: backwards for calls without some cotangents; None in inference.
    - ``cuda_graphs``: whether calls are replayed as CUDA graphs if that is safe.
    - ``gradient_parts``: the number of parts that backward runs in; None: as the call requires.
    - ``cache``: ``hit``, or the reason why the code was compiled and not loaded from the cache.
    - ``key``: the name of the code in the cache; empty if it is not there.
    - ``reuse``: how much memory the buffers of each function share, if its sizes are numbers.
    - ``freezing``: the arguments of ``forward`` if weights are frozen; otherwise None.
    - ``source``: the entries of the key in the cache that identify the graphs.
    - ``siblings``: for each output that other outputs are computed from, their numbers.
    - ``pieces``: how results of backward are cut into gradients; None: they are not.
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
    gradient_parts: int | None = None
    cache: str = ""
    key: str = ""
    reuse: Mapping[str, Reuse] = field(default_factory=dict)
    freezing: Freezing | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    siblings: Mapping[int, Collection[int]] = field(default_factory=dict)
    pieces: Pieces | None = None

    def forward(
        self,
        primals: Sequence[Any],
        strides: Strides = None,
        bound: Bound | None = None,
        *,
        copied: bool = False,
    ) -> list[Any]:
        """Run forward, and return its outputs followed by the residuals.

        Args:
            strides: strides by the number of an output, if they differ from the sample's.
            copied: whether the caller copies the outputs, which may have padded rows then.
        """
        results = self.loaded.run("forward", primals, self.copied_outputs, bound)
        if self.layouts.padded:
            self.layouts.cut(results)
            for number in () if copied else self.layouts.padded:
                results[number] = results[number].contiguous()
        if self.layouts.outputs or strides:
            put_on(self.layouts.outputs, results, strides)
        return results

    def backward(self, values: Sequence[Any], bound: Bound | None = None) -> list[torch.Tensor]:
        """Run backward, and return the gradients with the memory layouts of eager PyTorch."""
        gradients = self.loaded.run("backward", values, self.copied_gradients, bound)
        if self.layouts.gradients:
            put_on(self.layouts.gradients, gradients)
        return gradients

    def compile_no_more(self) -> None:
        """Compile no partial backward just for speed from now on: other code serves most calls."""
        if isinstance(self.partial_backwards, PartialBackwards):
            self.partial_backwards.for_speed = False

    @property
    def eager_functions(self) -> Mapping[str, int]:
        """The functions that run eagerly after the compiled code: the number of calls by name."""
        return self.captured.epilogue.functions if self.captured.epilogue is not None else {}

    @property
    def residual_bytes(self) -> int:
        """The bytes kept alive only for backward, without inputs, state and outputs."""
        return 0 if self.split is None else self.split.residual_bytes

    @property
    def residuals(self) -> tuple[ValueDescriptor, ...]:
        """The values that :attr:`residual_bytes` counts, the largest first."""
        if self.split is None:
            return ()
        values = (*self.split.residuals, *self.split.drawn)
        return tuple(sorted(values, key=lambda v: -v.spec.nbytes))


def compile_module(
    request: CompileRequest, building: Callable[..., Building] = CachedBuild
) -> CompiledModule:
    """Compile a module for the arguments of a call.

    Args:
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
    """Build the graphs that :func:`lower_module` returned, and load the code.

    ``options`` and ``building`` are as for :func:`compile_module`.

    Raises:
        BuildError: TVM cannot compile the graphs for the target.
    """
    stages = stages or StageDurations()
    mod, parts = lay_out_functions(lowered.mod, lowered.split, lowered.layouts, records)
    if parts is not None and parts.functions:
        mod = run_passes(mod, [RemoveBorders(), *tidy_passes()], records)
    device = lowered.captured.device
    mod = run_passes(mod, [ReturnWhole()], records)
    if parts is None and _replays(options, device) and not sizes_vary():
        kept = frozenset(lowered.layouts.outputs) | _not_returned(lowered.captured)
        mod = run_passes(mod, [ReturnPadded(kept)], records)
    with stages.measure("build"):
        build = building(lowered.target, options, device)
        if isinstance(build, CachedBuild):
            captured = lowered.captured
            structure = captured.convention.out_spec
            bound = bound_entry(captured.inputs, captured.outputs, structure, parts)
            build = replace(build, bound=bound)
        built = build(mod, records, None if parts is None else parts.bundle)
        if options.tuning_records:
            note_missing(built.missing, options.tuning_logs, lowered.target, lowered.origin)
    partial_backwards = None
    if parts is not None:
        partial_backwards = PartialBackwards(
            BackwardLoader(build, parts, lowered.layouts.gradients, device)
        )
    compiled = assembled(lowered, mod, parts, built, records, stages)
    return replace(with_call_options(compiled, options), partial_backwards=partial_backwards)


def with_call_options(compiled: CompiledModule, options: CompileOptions) -> CompiledModule:
    """Return ``compiled`` with the options that affect its calls, and not its code."""
    replays = _replays(options, compiled.captured.device)
    return replace(compiled, cuda_graphs=replays, gradient_parts=options.gradient_parts)


def _replays(options: CompileOptions, device: torch.device) -> bool:
    return options.cuda_graphs is not False and backend_of(device).replays


def _not_returned(captured: CapturedGraph) -> frozenset[int]:
    """Return the numbers of computed outputs that are more than results of forward."""
    computed = [output for output in captured.outputs if output.is_computed]
    return frozenset(n for n, o in enumerate(computed) if o.kind is not OutputKind.USER)


def assembled(
    lowered: LoweredModule,
    mod: tvm.IRModule,
    parts: SplitModule | None,
    built: Built,
    records: list[PassRecord],
    stages: StageDurations,
) -> CompiledModule:
    """Assemble the compiled module, without partial backwards, from the results of the stages.

    Args:
        mod: the graphs after :func:`lay_out_functions`.
        parts: the split functions after it; None in inference.
    """
    derivation, imported = lowered.derivation, lowered.imported
    copied_outputs, copied_gradients = copied_results(lowered, parts, built.shared)
    gradients = None
    if parts is not None and wholes_of(mod["backward"]):
        gradients = Pieces.of_function(mod["backward"])
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
        layouts=lowered.layouts.with_padded(mod["forward"]),
        joint=None if derivation is None else derivation.source,
        joint_reason="" if derivation is None else derivation.reason,
        native_calls=imported.native_calls,
        aten_calls=imported.aten_calls,
        coverage=built.coverage,
        cache=built.cache,
        key=built.key,
        source=built.source,
        siblings={} if parts is None else siblings_of(lowered.captured, parts.cotangent_of),
        pieces=gradients,
        reuse=built.reuse,
        records=tuple(records),
        seconds=stages.seconds,
    )


def copied_results(
    lowered: LoweredModule,
    parts: SplitModule | None,
    shared: Mapping[str, frozenset[int]],
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the numbers of outputs, and of gradients, that share memory with another tensor."""
    outputs = shared["forward"].intersection(range(lowered.num_outputs))
    return outputs, frozenset() if parts is None else shared["backward"]

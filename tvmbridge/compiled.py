"""Compilation of one module for one signature and mode, from capture to loaded code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tvm
from torch import nn

from tvmbridge.build import build, resolve_target
from tvmbridge.capture import capture_staged
from tvmbridge.coloring import color
from tvmbridge.combining import Combining, Packs
from tvmbridge.cotangents import PartialBackwards
from tvmbridge.differentiation.facts import NothingToDifferentiateError, refuse_other_draws
from tvmbridge.differentiation.joint import Derivation, derive
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.durations import Stages
from tvmbridge.frontend import ImportedModule, import_graph
from tvmbridge.memory.laying_out import Layouts, lay_out_functions, put_on, shared_residuals
from tvmbridge.memory.layouts import Strides, output_layouts
from tvmbridge.memory.packing import Packing
from tvmbridge.observing.staging import staged
from tvmbridge.options import CompileOptions
from tvmbridge.pipeline import AnyPass, inference_passes, run_extra_passes, run_passes
from tvmbridge.records import Coverage, Library
from tvmbridge.records.library import EMPTY
from tvmbridge.records.pending import note_missing
from tvmbridge.runtime import LoadedModule
from tvmbridge.split import SplitModule, split
from tvmbridge.types import CapturedGraph, PassRecord, ValueDescriptor


@dataclass(frozen=True)
class CompiledModule:
    """Loaded code of one module for one signature and mode.

    ``loaded`` has ``forward(primals...) -> (outputs..., residuals...)`` and, when ``split`` is not
    None, ``backward(reads..., residuals..., cotangents...) -> (gradients...)``. Primals are the
    user inputs, the parameters and buffers, the draws, the dropout masks and the packed weights, in
    this order. ``packs`` are the names of the parameters in each packed weight.
    ``copied_outputs`` and ``copied_gradients`` are results that share memory with another tensor
    and must be copied before they are handed out. ``layouts`` are those of results that eager
    PyTorch does not return contiguous. ``joint`` names the source of the joint function (None where
    nothing is differentiated), ``joint_reason`` says why it is not ``relax``.
    ``recorded``: it serves calls that autograd records.
    ``coverage`` counts the calls of kernels by where these come from. ``partial_backwards``: those
    without some of the cotangents (None where ``split`` is None).
    """

    captured: CapturedGraph
    recorded: bool
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
    partial_backwards: PartialBackwards | None = None

    def forward(
        self, primals: Sequence[torch.Tensor], strides: Strides = None
    ) -> list[torch.Tensor]:
        """The outputs, with the sample's strides or with these, and the residuals."""
        results = self.loaded.run("forward", primals, self.copied_outputs)
        put_on(self.layouts.outputs, results, strides)
        return results

    def backward(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients, laid out as in eager PyTorch."""
        gradients = self.loaded.run("backward", values, self.copied_gradients)
        put_on(self.layouts.gradients, gradients)
        return gradients

    @property
    def eager_functions(self) -> Mapping[str, int]:
        """What runs in eager PyTorch after the compiled code, counted by name."""
        return self.captured.tail.functions if self.captured.tail is not None else {}

    @property
    def residual_bytes(self) -> int:
        """Bytes that live for backward's sake; inputs, state and outputs are not counted."""
        return sum(r.spec.nbytes for r in self.residuals)

    @property
    def residuals(self) -> tuple[ValueDescriptor, ...]:
        """What :attr:`residual_bytes` is made of, the largest first."""
        if self.split is None:
            return ()
        values = (*self.split.residuals, *self.split.drawn)
        return tuple(sorted(values, key=lambda v: -v.spec.nbytes))


@dataclass(frozen=True)
class LoweredModule:
    """A module as graphs, before it is built: what compilation and comparison have in common.

    ``mod`` has ``forward``, and ``backward`` when ``split`` is not None. ``derivation`` is None
    where nothing is differentiated: autograd does not record the call (``recorded``), or no output
    requires a gradient. ``origin`` is the class of the module, for people.
    """

    captured: CapturedGraph
    recorded: bool
    target: tvm.target.Target
    imported: ImportedModule
    derivation: Derivation | None
    split: SplitModule | None
    mod: tvm.IRModule
    num_outputs: int
    origin: str
    packs: Packs = ()

    @property
    def layouts(self) -> Layouts:
        """Those of the results that eager PyTorch does not return contiguous."""
        gradients = {} if self.derivation is None else self.derivation.layouts
        return Layouts(output_layouts(self.captured), gradients)


def lower_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    needs_grad: bool,
    target: Any = None,
    options: CompileOptions,
    records: list[PassRecord],
    measure: Callable[[str], AbstractContextManager[None]],
    passes: Sequence[AnyPass] = (),
    packing: Packing | None = None,
    apart: bool = True,
) -> LoweredModule:
    """Capture ``module`` and run the graph passes, up to the functions that are built.

    Args:
        measure: entered around each stage with its name.
        passes: run behind the graph passes of the pipeline and the extra ones of ``options``,
            before a joint function is split.
        packing: says which parameters may be moved to lie side by side; None: none of them.
        apart: trace a stand-in, so that other threads may run the module meanwhile.

    Raises:
        CaptureError, UnsupportedOperatorError, PassError: the stage that failed.
        BuildError: the target is unknown, or does not fit the tensors' device.
    """
    passes, origin = [*options.extra_passes, *passes], type(module).__name__
    with measure("capture"):
        stage = staged(module, args, kwargs, needs_grad, apart=apart)
        captured = capture_staged(stage, args, kwargs, needs_grad)
        module = stage.module
        resolved = resolve_target(target, captured.device.type)
    derivation = None
    if needs_grad:
        with measure("differentiate"), suppress(NothingToDifferentiateError):
            derivation = derive(module, args, kwargs, captured, options, records)
    if derivation is not None:
        with measure("split"):
            combining = Combining.of(derivation.captured, packing, options, records)
            joint, packs = combining.joint(derivation.joint)
            joint = replace(joint, mod=run_extra_passes(joint.mod, passes, records))
            parts = split(joint, color(joint, options.residual_policy, options.recompute))
        return LoweredModule(
            derivation.captured,
            True,
            resolved,
            derivation.imported,
            derivation,
            parts,
            parts.mod,
            parts.num_outputs,
            origin,
            packs,
        )
    with measure("import"):
        # Export drops draws that nothing reads, in evaluation too.
        refuse_other_draws(Rehearsal(module, args, kwargs, captured))
        imported = import_graph(captured)
    with measure("passes"):
        mod = run_passes(imported.mod, inference_passes(), records)
        mod, packs = Combining.of(captured, packing, options, records).inference(mod)
        mod = run_extra_passes(mod, passes, records)
        mod = tvm.IRModule({"forward": mod["main"].with_attr("global_symbol", "forward")})
    count = sum(o.is_computed for o in captured.outputs)
    return LoweredModule(
        captured, needs_grad, resolved, imported, None, None, mod, count, origin, packs
    )


def compile_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    needs_grad: bool,
    target: Any = None,
    options: CompileOptions,
    apart: bool = True,
    packing: Packing | None = None,
) -> CompiledModule:
    """Compile ``module`` for these arguments, in the mode it stands in.

    Args:
        needs_grad: compile forward and backward; otherwise forward alone.
        apart: trace a stand-in, so that other threads may run the module meanwhile.
        packing: says which parameters may be moved to lie side by side; None: none of them.

    Raises:
        NotApartError: forward reaches the module itself, so that no stand-in can be traced.
        CaptureError, UnsupportedOperatorError, PassError, BuildError: the stage that failed.
    """
    stages = Stages()
    records: list[PassRecord] = []
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
        apart=apart,
    )
    return build_lowered(lowered, options, records, stages)


def build_lowered(
    lowered: LoweredModule,
    options: CompileOptions,
    records: list[PassRecord],
    stages: Stages | None = None,
) -> CompiledModule:
    """Build what :func:`lower_module` made and load it.

    Raises:
        BuildError: TVM cannot compile it for the target.
    """
    stages = stages or Stages()
    derivation, imported = lowered.derivation, lowered.imported
    layouts = lowered.layouts
    mod, parts = lay_out_functions(lowered.mod, lowered.split, layouts, records)
    with stages.measure("build"):
        use_records = options.tuning_records
        library = Library.open(options.tuning_logs, lowered.target) if use_records else EMPTY
        building = partial(
            build, target=lowered.target, measure=options.measure_kernels, library=library
        )
        built = building(mod, records=records)
        loaded = LoadedModule(built.machine, built.unaligned)
        if use_records:
            note_missing(built.missing, options.tuning_logs, lowered.target, lowered.origin)
    return CompiledModule(
        captured=lowered.captured,
        recorded=lowered.recorded,
        packs=lowered.packs,
        split=parts,
        loaded=loaded,
        target=lowered.target,
        num_outputs=lowered.num_outputs,
        copied_outputs=built.shared["forward"].intersection(range(lowered.num_outputs))
        | shared_residuals(mod, layouts.outputs, lowered.num_outputs),
        copied_gradients=frozenset() if parts is None else built.shared["backward"],
        layouts=layouts,
        joint=None if derivation is None else derivation.source,
        joint_reason="" if derivation is None else derivation.reason,
        native_calls=imported.native_calls,
        aten_calls=imported.aten_calls,
        coverage=built.coverage,
        records=tuple(records),
        seconds=stages.seconds,
        partial_backwards=(
            None if parts is None else PartialBackwards(parts, building, layouts.gradients)
        ),
    )

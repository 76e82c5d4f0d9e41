"""Lower a module to the Relax functions ``forward`` and ``backward``, ready to be built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
import tvm

from tvmbridge.backends import backend_of, resolve_target
from tvmbridge.calls.layouts import output_layouts
from tvmbridge.compiler.combining import Combining, Packs
from tvmbridge.compiler.laying_out import Layouts
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.compiler.split import SplitModule, colored, split
from tvmbridge.core.alone import runs_alone
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.decisions import noted, skip
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.differentiation.facts import (
    GradientFacts,
    NothingToDifferentiateError,
    refuse_other_draws,
)
from tvmbridge.differentiation.joint import Derivation, derive
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.frontend import ImportedModule, import_graph
from tvmbridge.graph_capture.capture import capture_staged
from tvmbridge.graph_capture.observe.staging import StagedModule, staged
from tvmbridge.pipeline import AnyPass, fx_passes_of, inference_passes, run_extra_passes, run_passes

logger = logging.getLogger(__name__)

_CAPTURE = "capture"


@dataclass(frozen=True)
class Known:
    """Results of compiling a module for other sizes, which are valid for the present sizes too.

    - ``stage``: the module prepared for capture; None: prepare it now.
    - ``captured``: its captured graph for the present sizes; None: capture it now.
    - ``facts``: how eager PyTorch differentiates it; None: find out now.
    """

    stage: StagedModule | None = None
    captured: CapturedGraph | None = None
    facts: GradientFacts | None = None


NOTHING_KNOWN = Known()


@dataclass(frozen=True)
class LoweredModule:
    """A module as Relax functions, before it is built.

    - ``captured``: the captured graph.
    - ``recorded``: whether autograd records the calls that are served.
    - ``imported``: the graph as the frontend converted it.
    - ``derivation``: the joint function and its source; None if nothing is differentiated, because
      autograd does not record the call or no output requires a gradient.
    - ``split``: the forward and backward functions; None in inference.
    - ``mod``: the functions ``forward`` and, with ``split``, ``backward``.
    - ``origin``: the name of the module's class.
    - ``num_outputs``: the number of outputs that forward computes, without residuals.
    - ``packs``: for each packed weight (one tensor of several parameters), the parameters' names.
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
        """The layouts of the results that eager PyTorch does not return contiguous."""
        gradients = {} if self.derivation is None else self.derivation.layouts
        return Layouts(output_layouts(self.captured), gradients)


def lower_module(
    request: CompileRequest,
    *,
    records: list[PassRecord] | None = None,
    measure: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    passes: Sequence[AnyPass] = (),
    known: Known = NOTHING_KNOWN,
) -> LoweredModule:
    """Capture a module and run the graph passes, up to the functions that are built.

    Args:
        measure: entered around each stage with its name.
        passes: run behind the graph passes of the pipeline and the extra ones of the options,
            before a joint function is split.
        known: what is known from compiling the module for other sizes.

    Raises:
        CaptureError, UnsupportedOperatorError, PassError: the stage that failed.
        BuildError: the target is unknown, or does not fit the tensors' device.
    """
    module, args, kwargs = request.module, request.args, request.kwargs
    needs_grad, options = request.needs_grad, request.options
    records = [] if records is None else records
    passes = [*options.extra_passes, *passes]
    with measure("capture"):
        stage = known.stage or staged(
            module, args, kwargs, needs_grad, apart=request.apart, autocast=request.autocast
        )
        stage = replace(stage, fx_passes=fx_passes_of(options))
        if known.captured is None:
            capture = partial(capture_staged, stage, args, kwargs, needs_grad, records)
            captured = noted(_CAPTURE, capture)
        else:
            captured = known.captured
            skip(_CAPTURE)
        resolved = resolve_target(request.target, captured.device)
    derivation = None
    if needs_grad:
        with measure("differentiate"), suppress(NothingToDifferentiateError):
            derivation = derive(stage.module, args, kwargs, captured, options, records, known.facts)
    if derivation is not None:
        with measure("split"):
            combining = Combining.of(derivation.captured, request.packing, options, records)
            parts, packs = _forward_and_backward(derivation, combining, options, passes)
        captured, imported = derivation.captured, derivation.imported
        mod, num_outputs = parts.mod, parts.num_outputs
    else:
        with measure("import"):
            if known.captured is None and not runs_alone():
                # torch.export drops random draws that nothing reads, in evaluation too.
                refuse_other_draws(Rehearsal(stage.module, args, kwargs, captured))
            imported = import_graph(captured)
        with measure("passes"):
            combining = Combining.of(captured, request.packing, options, records)
            mod, packs = _forward(imported, captured.device, combining, passes)
        parts, num_outputs = None, sum(o.is_computed for o in captured.outputs)
    return LoweredModule(
        captured=captured,
        recorded=needs_grad,
        target=resolved,
        imported=imported,
        derivation=derivation,
        split=parts,
        mod=mod,
        num_outputs=num_outputs,
        origin=type(module).__name__,
        packs=packs,
    )


def _forward_and_backward(
    derivation: Derivation,
    combining: Combining,
    options: CompileOptions,
    passes: Sequence[AnyPass],
) -> tuple[SplitModule, Packs]:
    joint, packs = combining.joint(derivation.joint)
    device = derivation.captured.device
    mod = run_passes(joint.mod, _of_device(joint.mod, device, True, options), combining.records)
    joint = replace(joint, mod=run_extra_passes(mod, passes, combining.records))
    parts = split(*colored(joint, options, device))
    if parts.recomputation is not None:
        level = logging.INFO if parts.recomputation.fits else logging.WARNING
        logger.log(level, "%s", parts.recomputation)
    return parts, packs


def _of_device(
    mod: tvm.IRModule, device: torch.device, has_backward: bool, options: CompileOptions
) -> list[AnyPass]:
    # Convolutions with frozen weights are measured later, with packed weights.
    measure = options.measure_kernels and not options.freeze
    return backend_of(device).graph_passes(mod, has_backward, measure)


def _forward(
    imported: ImportedModule, device: torch.device, combining: Combining, passes: Sequence[AnyPass]
) -> tuple[tvm.IRModule, Packs]:
    mod = run_passes(imported.mod, inference_passes(), combining.records)
    mod, packs = combining.inference(mod)
    mod = run_passes(mod, _of_device(mod, device, False, combining.options), combining.records)
    mod = run_extra_passes(mod, passes, combining.records)
    return tvm.IRModule({"forward": mod["main"].with_attr("global_symbol", "forward")}), packs

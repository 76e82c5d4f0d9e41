"""Compilation of one module for one signature and mode, from capture to loaded code."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from torch import nn

from tvmbridge.build import build, resolve_target
from tvmbridge.capture import capture
from tvmbridge.coloring import color
from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.facts import refuse_other_draws
from tvmbridge.frontend import import_graph
from tvmbridge.joint import Derivation, derive
from tvmbridge.options import CompileOptions
from tvmbridge.passes.base import storage_roots
from tvmbridge.pipeline import inference_passes, run_passes
from tvmbridge.records import Coverage, Folder, Library, Task
from tvmbridge.records.library import EMPTY, named_log_dir
from tvmbridge.records.pending import note_pending
from tvmbridge.rehearsal import Rehearsal
from tvmbridge.runtime import LoadedModule
from tvmbridge.split import SplitModule, split
from tvmbridge.types import CapturedGraph, OutputKind, PassRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledModule:
    """Loaded code of one module for one signature and mode.

    ``loaded`` has ``forward(primals...) -> (outputs..., residuals...)`` and, when ``split`` is not
    None, ``backward(reads..., residuals..., cotangents...) -> (gradients...)``. Primals are the
    user inputs, the parameters and buffers, the draws and the dropout masks, in this order.
    ``copied_outputs`` and ``copied_gradients`` are results that share memory with another tensor
    and must be copied before they are handed out. ``joint`` names the source of the joint function
    (None where nothing is differentiated), ``joint_reason`` says why it is not ``relax``.
    ``coverage`` counts the calls of kernels by where these come from.
    """

    captured: CapturedGraph
    split: SplitModule | None
    loaded: LoadedModule
    target: tvm.target.Target
    num_outputs: int
    copied_outputs: frozenset[int]
    copied_gradients: frozenset[int]
    joint: str | None
    joint_reason: str
    native_calls: Mapping[str, int]
    aten_calls: Mapping[str, int]
    coverage: Coverage
    records: tuple[PassRecord, ...]
    seconds: Mapping[str, float]

    @property
    def residual_bytes(self) -> int:
        """Bytes that forward keeps for backward, inputs not counted."""
        return 0 if self.split is None else self.split.residual_bytes


class Stages:
    """Wall-clock seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = time.perf_counter() - start


def compile_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    needs_grad: bool,
    target: Any = None,
    options: CompileOptions,
) -> CompiledModule:
    """Compile ``module`` for these arguments, in the mode it stands in.

    Args:
        needs_grad: compile forward and backward; otherwise forward alone.

    Raises:
        CaptureError, UnsupportedOperatorError, PassError, BuildError: the stage that failed.
    """
    stages = Stages()
    records: list[PassRecord] = []
    functions = pure_functions(
        module,
        args,
        kwargs,
        needs_grad=needs_grad,
        target=target,
        options=options,
        stages=stages,
        records=records,
    )
    mod, resolved = functions.mod, functions.target
    with stages.measure("build"):
        library = Library.open(options.tuning_logs, resolved) if options.tuning_records else EMPTY
        built = build(mod, resolved, records, measure=options.measure_kernels, library=library)
        loaded = LoadedModule(built.machine, built.unaligned)
        _note_missing(built.missing, resolved, options, type(module).__name__)
    derivation = functions.derivation
    return CompiledModule(
        captured=functions.captured,
        split=functions.split,
        loaded=loaded,
        target=resolved,
        num_outputs=functions.num_outputs,
        copied_outputs=shared_results(mod, "forward", functions.num_outputs),
        copied_gradients=(
            frozenset() if functions.split is None else shared_results(mod, "backward")
        ),
        joint=None if derivation is None else derivation.source,
        joint_reason="" if derivation is None else derivation.reason,
        native_calls=functions.native_calls,
        aten_calls=functions.aten_calls,
        coverage=built.coverage,
        records=tuple(records),
        seconds=stages.seconds,
    )


def _note_missing(
    missing: Mapping[Task, int], target: tvm.target.Target, options: CompileOptions, origin: str
) -> None:
    """Put tasks without a record on the list of the directory that the user named, if any."""
    log_dir = named_log_dir(options.tuning_logs)
    if log_dir is None or not missing or not options.tuning_records:
        return
    folder = Folder.below(log_dir, target)
    noted = note_pending(folder, missing, origin)
    logger.info("%d kernels without a tuning record are pending in %s", noted, folder.path)


@dataclass(frozen=True)
class PureFunctions:
    """``forward`` and, where ``split`` is not None, ``backward``, in Relax's operators."""

    captured: CapturedGraph
    derivation: Derivation | None
    split: SplitModule | None
    mod: tvm.IRModule
    num_outputs: int
    target: tvm.target.Target
    native_calls: Mapping[str, int]
    aten_calls: Mapping[str, int]


def pure_functions(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    needs_grad: bool,
    target: Any,
    options: CompileOptions,
    stages: Stages,
    records: list[PassRecord],
) -> PureFunctions:
    """What is to be built for ``module``; arguments and errors as in :func:`compile_module`."""
    with stages.measure("capture"):
        captured = capture(module, args, sample_kwargs=kwargs, needs_grad=needs_grad)
        resolved = resolve_target(target, captured.device.type)
        _refuse_mutation_under_gradient(captured, needs_grad)
    derivation: Derivation | None = None
    parts: SplitModule | None = None
    if needs_grad:
        with stages.measure("differentiate"):
            derivation = derive(module, args, kwargs, captured, options, records)
            parts = split(derivation.joint, color(derivation.joint))
        captured, imported = derivation.captured, derivation.imported
        mod, num_outputs = parts.mod, parts.num_outputs
    else:
        with stages.measure("import"):
            if captured.training:
                refuse_other_draws(Rehearsal(module, args, kwargs, captured))
            imported = import_graph(captured)
        with stages.measure("passes"):
            mod = run_passes(imported.mod, inference_passes(), records)
            mod = tvm.IRModule({"forward": mod["main"].with_attr("global_symbol", "forward")})
        num_outputs = sum(o.is_computed for o in captured.outputs)
    return PureFunctions(
        captured=captured,
        derivation=derivation,
        split=parts,
        mod=mod,
        num_outputs=num_outputs,
        target=resolved,
        native_calls=imported.native_calls,
        aten_calls=imported.aten_calls,
    )


def _refuse_mutation_under_gradient(captured: CapturedGraph, needs_grad: bool) -> None:
    mutated = [o.target for o in captured.outputs if o.kind is OutputKind.INPUT_MUTATION]
    if needs_grad and mutated:
        raise UnsupportedOperatorError(
            f"forward writes into its input {mutated[0]} while gradients are recorded"
        )


def shared_results(mod: tvm.IRModule, name: str, count: int | None = None) -> frozenset[int]:
    """Results of a function that share memory with an argument or with an earlier result."""
    function = mod[name]
    roots: Sequence[Any] = storage_roots(function)[:count]
    seen = set(function.params)
    shared = set()
    for index, root in enumerate(roots):
        if root in seen or root is None:
            shared.add(index)
        else:
            seen.add(root)
    return frozenset(shared)

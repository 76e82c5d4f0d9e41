"""Compilation of one module for one signature and mode, from capture to loaded code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from torch import nn

from tvmbridge.build import build, resolve_target
from tvmbridge.capture import capture_staged
from tvmbridge.coloring import color
from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.facts import refuse_other_draws
from tvmbridge.frontend import import_graph
from tvmbridge.joint import Derivation, derive
from tvmbridge.observation import staged
from tvmbridge.options import CompileOptions
from tvmbridge.passes.base import storage_roots
from tvmbridge.pipeline import inference_passes, run_passes
from tvmbridge.rehearsal import Rehearsal
from tvmbridge.runtime import LoadedModule
from tvmbridge.split import SplitModule, split
from tvmbridge.types import CapturedGraph, OutputKind, PassRecord


@dataclass(frozen=True)
class CompiledModule:
    """Loaded code of one module for one signature and mode.

    ``loaded`` has ``forward(primals...) -> (outputs..., residuals...)`` and, when ``split`` is not
    None, ``backward(reads..., residuals..., cotangents...) -> (gradients...)``. Primals are the
    user inputs, the parameters and buffers, the draws and the dropout masks, in this order.
    ``copied_outputs`` and ``copied_gradients`` are results that share memory with another tensor
    and must be copied before they are handed out. ``joint`` names the source of the joint function
    (None where nothing is differentiated), ``joint_reason`` says why it is not ``relax``.
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
    records: tuple[PassRecord, ...]
    seconds: Mapping[str, float]

    @property
    def residual_bytes(self) -> int:
        """Bytes that forward keeps for backward, inputs not counted."""
        return 0 if self.split is None else self.split.residual_bytes


class _Stages:
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
    apart: bool = True,
) -> CompiledModule:
    """Compile ``module`` for these arguments, in the mode it stands in.

    Args:
        needs_grad: compile forward and backward; otherwise forward alone.
        apart: trace a stand-in, so that other threads may run the module meanwhile.

    Raises:
        NotApartError: forward reaches the module itself, so that no stand-in can be traced.
        CaptureError, UnsupportedOperatorError, PassError, BuildError: the stage that failed.
    """
    stages = _Stages()
    records: list[PassRecord] = []
    with stages.measure("capture"):
        stage = staged(module, args, kwargs, needs_grad, apart=apart)
        captured = capture_staged(stage, args, kwargs, needs_grad)
        module = stage.module
        resolved = resolve_target(target, captured.device.type)
        _refuse_mutation_under_gradient(captured, needs_grad)
    derivation: Derivation | None = None
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
            parts = None
        num_outputs = sum(o.is_computed for o in captured.outputs)
    with stages.measure("build"):
        built = build(mod, resolved, records, measure=options.measure_kernels)
        loaded = LoadedModule(built.machine, built.unaligned)
    return CompiledModule(
        captured=captured,
        split=parts,
        loaded=loaded,
        target=resolved,
        num_outputs=num_outputs,
        copied_outputs=shared_results(mod, "forward", num_outputs),
        copied_gradients=frozenset() if parts is None else shared_results(mod, "backward"),
        joint=None if derivation is None else derivation.source,
        joint_reason="" if derivation is None else derivation.reason,
        native_calls=imported.native_calls,
        aten_calls=imported.aten_calls,
        records=tuple(records),
        seconds=stages.seconds,
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

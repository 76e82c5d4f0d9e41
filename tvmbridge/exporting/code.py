"""Compile a module's forward into code that runs without PyTorch, and collect its weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tvm
from torch import nn

from tvmbridge.backends import backend_of
from tvmbridge.calls.standins import without_inference_tensors, wrapped_dispatcher
from tvmbridge.compiler.build import Code, build
from tvmbridge.compiler.durations import StageDurations
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.compiler.freezing import Freezing, freeze
from tvmbridge.compiler.lowering import LoweredModule, lower_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.alone import code_runs_alone
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.turns import compiling
from tvmbridge.core.types import PassRecord
from tvmbridge.exporting.building import build_alone, left_to_pytorch
from tvmbridge.exporting.convention import (
    described_inputs,
    described_structure,
    dtype_name,
    input_names,
    returned,
    user_inputs,
)
from tvmbridge.exporting.gpu import is_gpu
from tvmbridge.exporting.left import without_left
from tvmbridge.exporting.leftovers import effects, refuse
from tvmbridge.exporting.packing import PackWeights, packed_parameters, packed_weight
from tvmbridge.exporting.views import with_views
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.kernels.dtypes import as_pairs
from tvmbridge.passes.relax.lift_frozen import TRANSFORM
from tvmbridge.pipeline import run_passes
from tvmbridge.runtime.entry_compiler import apart_or_itself
from tvmbridge.runtime.frozen import FrozenWeights
from tvmbridge.runtime.guards.state import ModuleState
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.target import host_target


@dataclass(frozen=True)
class AloneCode:
    """Code of ``forward(inputs..., weights...)``, and the facts that a caller needs.

    - ``executable``: TVM's executable, not yet linked.
    - ``target``: the TVM target of the code.
    - ``inputs``, ``symbols``, ``relations``, ``outputs``, ``structure``, ``checks``, ``constants``:
      entries of the manifest with these names.
    - ``weights``: the tensors, contiguous, in the order in which the code takes them.
    - ``weight_names``: their names, which repeat if the code takes two parts of one weight.
    """

    executable: Any
    target: tvm.target.Target
    inputs: list[dict[str, Any]]
    symbols: list[dict[str, Any]]
    relations: list[Any]
    outputs: list[dict[str, Any]]
    structure: dict[str, Any]
    checks: list[dict[str, Any]]
    constants: dict[str, str]
    weights: Sequence[torch.Tensor]
    weight_names: Sequence[str]


def alone_code(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    target: Any,
    options: CompileOptions,
) -> AloneCode:
    """Compile ``module``, which is in eval mode, for these arguments.

    Raises:
        ExportError: an operator or an effect needs PyTorch.
        CaptureError, UnsupportedOperatorError, PassError, BuildError: the stage that failed.
    """
    register_containers(module)
    with torch.no_grad(), compiling(), tracing_here(), undisturbed(), code_runs_alone():
        args, kwargs = without_inference_tensors((args, dict(kwargs)))
        records: list[PassRecord] = []
        gpu = target if is_gpu(target) else None
        lowered = _lowered(module, args, kwargs, None if gpu else target, options, records)
        if not backend_of(lowered.captured.device).runs_alone:
            raise ExportError(
                f"the module is on {lowered.captured.device}, and is exported from the CPU: move "
                "it there, and name a GPU by target="
            )
        if gpu is not None:
            lowered = replace(lowered, target=gpu)
        refuse_effects(lowered)
        return _built(module, lowered, options, records)


def refuse_effects(lowered: LoweredModule) -> None:
    """Refuse a module whose calls do more than return results.

    Raises:
        ExportError: the message names all such effects, and all operators that need PyTorch.
    """
    found = effects(lowered.captured)
    if found:
        refuse([*found, *left_to_pytorch(lowered.mod, lowered.target)])


def _lowered(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    options: CompileOptions,
    records: list[PassRecord],
) -> LoweredModule:
    # Nothing is measured: another machine may run the code, without PyTorch's kernels.
    unmeasured = replace(options, measure_kernels=False)
    request = CompileRequest(
        module, args, kwargs, needs_grad=False, target=target, options=unmeasured
    )
    installed = module.__dict__.get("forward")
    behind = wrapped_dispatcher(installed)
    own = installed if behind is None else behind.own
    lower = partial(lower_module, records=records, measure=StageDurations().measure)
    return apart_or_itself(module, own, lambda apart: lower(replace(request, apart=apart)))


def _built(
    module: nn.Module,
    lowered: LoweredModule,
    options: CompileOptions,
    records: list[PassRecord],
) -> AloneCode:
    graph = frozen_graph(module, lowered, options, records)
    if not is_gpu(lowered.target):
        graph = _packed(graph, records)
    as_graph = is_gpu(lowered.target) and options.cuda_graphs is True
    code = build_alone(graph.mod, lowered.target, records, as_graph=as_graph)
    return described_code(module, graph, code, records)


@dataclass(frozen=True)
class FrozenGraph:
    """A graph with frozen weights.

    - ``lowered``: the lowered module that the graph comes from.
    - ``plan``: the weights that the graph takes, and how they are computed from the module's.
    - ``mod``: the graph, whose only function is ``forward``.
    - ``packed``: the places of the weights, among the arguments of ``forward``, that it takes in
      the form of :func:`packed_weight`.
    """

    lowered: LoweredModule
    plan: Freezing
    mod: tvm.IRModule
    packed: frozenset[int] = frozenset()


def frozen_graph(
    module: nn.Module,
    lowered: LoweredModule,
    options: CompileOptions,
    records: list[PassRecord],
    live: frozenset[int] = frozenset(),
) -> FrozenGraph:
    """Return the graph with frozen weights; its results are all tensors that forward returns.

    ``live`` is as for :func:`freeze`.
    """
    for_gpu = is_gpu(lowered.target)
    lowered, plan = freeze(lowered, options, records, alone=True, live=live, for_gpu=for_gpu)
    forward = tvm.IRModule({"forward": lowered.mod["forward"]})
    mod = with_views(forward, lowered.captured, _tensors_of(module), records)
    if for_gpu:
        # The parameters behind these are the same at each call, as CUDA graphs need.
        inputs = len(user_inputs(lowered.captured))
        mod = tvm.IRModule({"forward": mod["forward"].with_attr("num_input", inputs)})
    lowered = replace(lowered, captured=without_left(lowered.captured))
    return FrozenGraph(lowered, plan, mod)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and other tensors in attributes of the module, by name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for held in (vars(each), each._buffers, each._parameters):
            names = {n: v for n, v in held.items() if isinstance(v, torch.Tensor)}
            found |= {f"{prefix}.{n}" if prefix else n: v for n, v in names.items()}
    return found


def _packed(graph: FrozenGraph, records: list[PassRecord]) -> FrozenGraph:
    """Return the graph with packed weights of products."""
    before = graph.mod["forward"]
    weights = tuple(p.name for p in before.params[len(user_inputs(graph.lowered.captured)) :])
    packing = PackWeights(Machine.of(graph.lowered.target), weights)
    mod = run_passes(graph.mod, [packing], records)
    return replace(graph, mod=mod, packed=packed_parameters(before, mod["forward"]))


def described_code(
    module: nn.Module,
    graph: FrozenGraph,
    code: Code,
    records: list[PassRecord],
) -> AloneCode:
    """Return ``code`` with its weights, and the facts that a caller needs."""
    captured = graph.lowered.captured
    weights, names = _weights(module, graph, records)
    outputs, structure, checks = _described_outputs(captured, code.shared["forward"])
    described = described_inputs(captured, input_names(captured, _parameter_names(module)))
    kept = [p for p in graph.plan.kept if p < len(described)]
    if kept != list(range(len(described))):
        raise ExportError("the code does not take all of forward's arguments")
    return AloneCode(
        executable=code.executable,
        target=graph.lowered.target,
        inputs=described,
        symbols=[],
        relations=[],
        outputs=outputs,
        structure=structure,
        checks=checks,
        constants={str(p): repr(v) for p, v in captured.assumptions.constants.items()},
        weights=weights,
        weight_names=names,
    )


def _weights(
    module: nn.Module, graph: FrozenGraph, records: list[PassRecord]
) -> tuple[list[torch.Tensor], list[str]]:
    """Return the weights that the code takes after the inputs, and their names."""
    lowered, plan = graph.lowered, graph.plan
    captured = lowered.captured
    first = len(user_inputs(captured))
    loaded: Any = None
    if any(value.result is not None for value in plan.values):
        transform = tvm.IRModule({TRANSFORM: lowered.mod[TRANSFORM]})
        built = build(transform, host_target(), records)
        loaded = LoadedModule(built.machine, built.unaligned, torch.device("cpu"))
    state = ModuleState(module, captured)
    tensors = [None if t is None else as_pairs(t) for t in state.tensors()]
    frozen = FrozenWeights(plan, loaded, state.names, tensors, first)
    primals = [*[None] * first, *tensors]
    values = [
        packed_weight(value, Machine.of(lowered.target)) if place in graph.packed else value
        for place, value in enumerate(frozen.arguments(primals)[first:], first)
    ]
    kept = [state.names[p - first] for p in plan.kept if p >= first]
    made = [f"folded.{i}" for i in range(len(plan.values))]
    return [v.detach().contiguous() for v in values], [*kept, *made]


def _described_outputs(
    captured: CapturedGraph, shared: frozenset[int]
) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Return the entries ``outputs``, ``structure`` and ``checks`` of the manifest."""
    convention = captured.convention
    users = returned(captured)
    numbers = {
        place: number
        for number, place in enumerate(i for i, o in enumerate(users) if o.spec is not None)
    }
    outputs = [
        {
            "dtype": dtype_name(users[place].spec.dtype),  # type: ignore[union-attr]
            "shape": list(users[place].spec.shape),  # type: ignore[union-attr]
            "copied": number in shared,
        }
        for place, number in numbers.items()
    ]
    structure = described_structure(captured, numbers)
    first = len(users) - len(convention.bases) - len(convention.checks)
    checks = [
        {
            "output": numbers[first + i],
            "error": check.error.__name__,
            "message": check.message,
        }
        for i, check in enumerate(convention.checks)
    ]
    return outputs, structure, checks


def _parameter_names(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in kinds][1:]

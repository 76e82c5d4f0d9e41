"""Bind the code that a plan describes to the module that is there."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import tvm
from torch import nn
from torch.export import ExportedProgram

from tvmbridge.cache.key import digest_of
from tvmbridge.compiler.backward_code import BackwardLoader
from tvmbridge.compiler.build import Built
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.compiler.partial_backwards import PartialBackwards
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.assumptions import OutsideValue
from tvmbridge.core.captured_graph import Assumptions, CapturedGraph
from tvmbridge.core.types import InputKind, PassRecord, TensorSpec
from tvmbridge.graph_capture.observe.descriptors import find_aliases
from tvmbridge.recall.plan import MOST_GRAPH_BYTES, CodePlan


class _NoProgram:
    """Stands in for the program of a graph that this process has not captured."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: the graph was captured in another process")


def captured_of(
    plan: CodePlan,
    module: nn.Module,
    leaves: Sequence[Any],
    values: Mapping[tuple[str, str], Any],
    outside: tuple[OutsideValue, ...],
) -> CapturedGraph:
    """Return the captured graph that a plan describes, without its program."""
    _refuse_misfit(plan, module, leaves)
    assumptions = Assumptions(
        training=plan.training,
        constants={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
        aliases=find_aliases(module),
        values=values,
        outside=outside,
        asks=plan.asks,
        is_compiling=plan.is_compiling,
        autocast=plan.autocast,
    )
    return CapturedGraph(
        program=cast("ExportedProgram", _NoProgram()),
        inputs=plan.inputs,
        outputs=plan.outputs,
        noise=plan.noise,
        constant_tensors={},
        convention=plan.convention,
        assumptions=assumptions,
        read=plan.read,
    )


def _refuse_misfit(plan: CodePlan, module: nn.Module, leaves: Sequence[Any]) -> None:
    """Raise ValueError unless each input that the code takes is there, with its shape and dtype.

    Code reads memory without checks, so a plan that was changed by hand must not be bound.
    """
    held: dict[str | None, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for each in plan.inputs:
        if each.kind is InputKind.CONSTANT:
            continue
        found = held.get(each.target)
        if each.kind is InputKind.USER:
            position = each.position
            found = None
            if position is not None and 0 <= position < len(leaves):
                found = leaves[position]
        if not isinstance(found, torch.Tensor) or TensorSpec.of(found) != each.spec:
            raise ValueError(f"the input {each.name} is not there as it was")
    computed = [each for each in plan.outputs if each.is_computed]
    numbers = {*plan.copied_outputs, *plan.siblings, *plan.cotangent_of, *plan.layouts.outputs}
    numbers |= {*plan.layouts.padded}
    numbers |= {number for number, _ in plan.kept_outputs}
    if plan.num_outputs != len(computed) or not numbers <= set(range(plan.num_outputs)):
        raise ValueError("the numbers of outputs disagree")
    if plan.primals is not None and not {*plan.reads, *plan.wanted} <= set(plan.primals):
        raise ValueError("the names of primals disagree")
    places = {place for whole in plan.wholes or () for place in whole.places}
    cut = {whole.number for whole in plan.wholes or ()}
    if not places <= set(range(len(plan.wanted))) or not cut <= set(range(plan.num_results)):
        raise ValueError("the numbers of gradients disagree")
    if plan.wholes is None and plan.num_results:
        raise ValueError("the numbers of gradients disagree")


def compiled_of(
    plan: CodePlan,
    captured: CapturedGraph,
    built: Built,
    build: CachedBuild,
    records: Sequence[PassRecord],
    graph: bytes,
) -> CompiledModule:
    """Return the compiled module that a plan describes.

    Args:
        build: builds partial backwards.
        graph: the compressed backward graph.
    """
    pieces = None if plan.wholes is None else Pieces(plan.wholes, plan.num_results)
    parts = _parts(plan)
    partial = None
    if parts is not None:
        backward = functools.partial(_backward, graph, plan.backward)
        gradients = plan.layouts.gradients
        partial = PartialBackwards(
            BackwardLoader(build, parts, gradients, captured.device, backward)
        )
    return CompiledModule(
        captured=captured,
        recorded=plan.recorded,
        origin=plan.origin,
        packs=plan.packs,
        split=parts,
        loaded=LoadedModule(built.machine, built.unaligned, captured.device, pieces),
        target=build.target,
        num_outputs=plan.num_outputs,
        copied_outputs=plan.copied_outputs,
        copied_gradients=plan.copied_gradients,
        layouts=plan.layouts,
        joint=plan.joint,
        joint_reason=plan.joint_reason,
        native_calls=plan.native_calls,
        aten_calls=plan.aten_calls,
        coverage=built.coverage,
        records=tuple(records),
        seconds={},
        partial_backwards=partial,
        cache=built.cache,
        key=built.key,
        source=plan.source,
        siblings=plan.siblings,
        pieces=pieces,
        reuse=built.reuse,
    )


def _parts(plan: CodePlan) -> SplitModule | None:
    if plan.primals is None:
        return None
    return SplitModule(
        mod=tvm.IRModule({}),
        primals=plan.primals,
        num_outputs=plan.num_outputs,
        reads=plan.reads,
        kept_outputs=plan.kept_outputs,
        residuals=plan.residuals,
        cotangent_of=plan.cotangent_of,
        wanted=plan.wanted,
        gradient_reads=plan.gradient_reads,
        drawn=plan.drawn,
        readers=plan.readers,
    )


def _backward(graph: bytes, digest: str) -> tvm.relax.Function:
    """Return the backward function; it is parsed only when a partial backward is compiled."""
    unpacked = zlib.decompressobj().decompress(graph, MOST_GRAPH_BYTES)
    if digest_of(unpacked) != digest:
        raise ValueError("the backward graph is damaged")
    return tvm.ir.load_json(unpacked.decode())["backward"]

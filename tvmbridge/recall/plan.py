"""The plan of compiled code: what capture and compilation have decided, as plain JSON.

A plan has no graph. It describes inputs, outputs and the calling convention, which passes and
operators the code has, and which values the guards compare.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import tvm
from torch import nn
from torch.export import ExportedProgram

from tvmbridge.cache.key import digest_of
from tvmbridge.compiler.build import Built
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.compiler.laying_out import Layouts
from tvmbridge.compiler.partial_backwards import PartialBackwards
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.compiler.readers import Readers
from tvmbridge.compiler.split import SplitModule
from tvmbridge.core.assumptions import OutsideValue, Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.captured_graph import Assumptions, CallingConvention, CapturedGraph
from tvmbridge.core.types import (
    InputDescriptor,
    InputKind,
    NoiseDescriptor,
    OutputDescriptor,
    PassRecord,
    TensorSpec,
    ValueDescriptor,
)
from tvmbridge.graph_capture.observe.descriptors import find_aliases
from tvmbridge.passes.relax.return_whole import Whole
from tvmbridge.recall.codec import decode_as, encode
from tvmbridge.recall.describe import UndescribableError

_MOST_GRAPH_BYTES = 2**28


@dataclass(frozen=True)
class Plan:
    """The description of a compiled module; the fields are those of the classes named below.

    - ``inputs`` to ``autocast``: of CapturedGraph and Assumptions.
    - ``recorded`` to ``siblings``: of CompiledModule.
    - ``wholes``, ``num_results``: of Pieces; None: there are none.
    - ``primals`` to ``readers``: of SplitModule; empty in inference.
    - ``backward``: the digest of the backward graph; empty in inference.
    """

    inputs: tuple[InputDescriptor, ...]
    outputs: tuple[OutputDescriptor, ...]
    noise: tuple[NoiseDescriptor, ...]
    convention: CallingConvention
    asks: frozenset[Question]
    is_compiling: bool
    training: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    recorded: bool
    origin: str
    packs: tuple[tuple[str, ...], ...]
    num_outputs: int
    copied_outputs: frozenset[int]
    copied_gradients: frozenset[int]
    layouts: Layouts
    joint: str | None
    joint_reason: str
    native_calls: Mapping[str, int]
    aten_calls: Mapping[str, int]
    source: Mapping[str, str]
    siblings: Mapping[int, frozenset[int]]
    wholes: tuple[Whole, ...] | None
    num_results: int
    primals: tuple[str, ...] | None
    reads: tuple[str, ...]
    kept_outputs: tuple[tuple[int, tuple[int, ...]], ...]
    residuals: tuple[ValueDescriptor, ...]
    cotangent_of: tuple[int, ...]
    wanted: tuple[str, ...]
    gradient_reads: tuple[frozenset[int], ...]
    drawn: tuple[ValueDescriptor, ...]
    readers: Readers | None
    backward: str

    def content(self) -> dict[str, Any]:
        """Return the plan as plain JSON.

        Raises:
            UndescribableError: a value has no JSON form.
        """
        return {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def parse(cls, content: Any) -> Plan:
        """Return the plan that :meth:`content` has described; check the type of each value.

        Raises:
            ValueError: ``content`` is of another form.
        """
        hints = _hints()
        if not isinstance(content, dict) or content.keys() != hints.keys():
            raise ValueError("its plan has other entries")
        return cls(**{name: decode_as(hint, content[name]) for name, hint in hints.items()})


@functools.cache
def _hints() -> Mapping[str, Any]:
    return typing.get_type_hints(Plan)


class _NoProgram:
    """Stands in for the program of a graph that this process has not captured."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: the graph was captured in another process")


def plan_of(compiled: CompiledModule) -> tuple[Plan, bytes]:
    """Return the plan of a module that was compiled just now, and its compressed backward graph.

    Raises:
        UndescribableError: something about the module cannot be described as data.
    """
    captured, parts = compiled.captured, compiled.split
    _refuse(compiled)
    graph = b"" if parts is None else tvm.ir.save_json(parts.mod).encode()
    if len(graph) > _MOST_GRAPH_BYTES:
        raise UndescribableError(f"a backward graph of {len(graph)} bytes")
    pieces = compiled.pieces
    assumed = captured.assumptions
    plan = Plan(
        inputs=captured.inputs,
        outputs=captured.outputs,
        noise=captured.noise,
        convention=captured.convention,
        asks=assumed.asks,
        is_compiling=assumed.is_compiling,
        training=assumed.training,
        autocast=assumed.autocast,
        recorded=compiled.recorded,
        origin=compiled.origin,
        packs=compiled.packs,
        num_outputs=compiled.num_outputs,
        copied_outputs=compiled.copied_outputs,
        copied_gradients=compiled.copied_gradients,
        layouts=compiled.layouts,
        joint=compiled.joint,
        joint_reason=compiled.joint_reason,
        native_calls=dict(compiled.native_calls),
        aten_calls=dict(compiled.aten_calls),
        source=dict(compiled.source),
        siblings={n: frozenset(readers) for n, readers in compiled.siblings.items()},
        wholes=None if pieces is None else pieces.wholes,
        num_results=0 if pieces is None else pieces.num_results,
        primals=None if parts is None else parts.primals,
        reads=() if parts is None else parts.reads,
        kept_outputs=() if parts is None else parts.kept_outputs,
        residuals=() if parts is None else parts.residuals,
        cotangent_of=() if parts is None else parts.cotangent_of,
        wanted=() if parts is None else parts.wanted,
        gradient_reads=() if parts is None else parts.gradient_reads,
        drawn=() if parts is None else parts.drawn,
        readers=None if parts is None else parts.readers,
        backward=digest_of(graph) if graph else "",
    )
    return plan, zlib.compress(graph, 1) if graph else b""


def _refuse(compiled: CompiledModule) -> None:
    """Raise UndescribableError if the code has a feature that a plan has no form for."""
    captured, convention = compiled.captured, compiled.captured.convention
    assumed = captured.assumptions
    features = {
        "frozen weights": compiled.freezing is not None,
        "no code in the cache": not compiled.key or not compiled.source,
        "random draws that read computed values": captured.prologue is not None,
        "functions that run eagerly after the code": captured.epilogue is not None,
        "tensors outside of the module": bool(captured.outside or assumed.foreign),
        "values of buffers that forward reads": bool(assumed.answers),
        "weights that hooks compute": bool(assumed.normed),
        "attributes that forward sets": bool(convention.assigned or convention.left),
        "containers among the arguments that forward changes": bool(convention.changed_arguments),
        "checks of data": bool(convention.checks),
        "tensors in plain attributes": any(d.kind is InputKind.ATTRIBUTE for d in captured.inputs),
        "custom autograd functions": compiled.split is not None and bool(compiled.split.functions),
        "dimensions that are symbols": not _is_static(captured),
    }
    for feature, present in features.items():
        if present:
            raise UndescribableError(feature)
    for node in captured.program.graph.nodes:
        if node.op == "call_function" and not _is_aten(node.target):
            raise UndescribableError(f"the operator {node.target}")


def _is_static(captured: CapturedGraph) -> bool:
    specs = [d.spec for d in (*captured.inputs, *captured.outputs) if d.spec is not None]
    return all(type(size) is int for spec in specs for size in (*spec.shape, *spec.stride))


def _is_aten(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten"
    return getattr(target, "__module__", "") == "_operator"


def captured_of(
    plan: Plan,
    module: nn.Module,
    leaves: Sequence[Any],
    values: Mapping[tuple[str, str], Any],
    outside: tuple[OutsideValue, ...],
) -> CapturedGraph:
    """Return the captured graph that a plan describes, without its program.

    Args:
        plan: the plan.
        module: the module that is there now.
        leaves: the leaves of the call's arguments.
        values: the expected attributes of the module.
        outside: the expected values outside of the module.
    """
    _refuse_misfit(plan, module, leaves)
    autocast: Autocast = plan.autocast
    assumptions = Assumptions(
        training=plan.training,
        constants={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
        aliases=find_aliases(module),
        values=values,
        outside=outside,
        asks=plan.asks,
        is_compiling=plan.is_compiling,
        autocast=autocast,
    )
    return CapturedGraph(
        program=cast("ExportedProgram", _NoProgram()),
        inputs=plan.inputs,
        outputs=plan.outputs,
        noise=plan.noise,
        constant_tensors={},
        convention=plan.convention,
        assumptions=assumptions,
    )


def _refuse_misfit(plan: Plan, module: nn.Module, leaves: Sequence[Any]) -> None:
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
    plan: Plan,
    captured: CapturedGraph,
    built: Built,
    build: CachedBuild,
    records: Sequence[PassRecord],
    graph: bytes,
) -> CompiledModule:
    """Return the compiled module that a plan describes.

    Args:
        plan: the plan.
        captured: the graph, by :func:`captured_of`.
        built: the loaded code.
        build: builds partial backwards.
        records: the records of the passes that ran when the code was compiled.
        graph: the compressed backward graph.
    """
    pieces = None if plan.wholes is None else Pieces(plan.wholes, plan.num_results)
    parts = _parts(plan)
    partial = None
    if parts is not None:
        backward = functools.partial(_backward, graph, plan.backward)
        gradients = plan.layouts.gradients
        partial = PartialBackwards(parts, build, gradients, captured.device, backward)
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


def _parts(plan: Plan) -> SplitModule | None:
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
    unpacked = zlib.decompressobj().decompress(graph, _MOST_GRAPH_BYTES)
    if digest_of(unpacked) != digest:
        raise ValueError("the backward graph is damaged")
    return tvm.ir.load_json(unpacked.decode())["backward"]

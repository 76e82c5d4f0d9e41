"""The plan of compiled code: what capture and compilation have decided, as plain JSON.

A plan has no graph. It describes inputs, outputs and the calling convention, which passes and
operators the code has, and which values the guards compare.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tvm

from tvmbridge.cache.key import digest_of
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.laying_out import Layouts
from tvmbridge.compiler.readers import Readers
from tvmbridge.core.assumptions import Question
from tvmbridge.core.captured_graph import CallingConvention, CapturedGraph
from tvmbridge.core.torch_private import OpOverload
from tvmbridge.core.types import (
    InputDescriptor,
    InputKind,
    NoiseDescriptor,
    OutputDescriptor,
    ValueDescriptor,
)
from tvmbridge.passes.relax.return_whole import Whole
from tvmbridge.recall.codec import decode_as, encode
from tvmbridge.recall.describe import UndescribableError

MOST_GRAPH_BYTES = 2**28
# Other operators of tvmbridge stand for functions of one process.
_ATTENTION = {"tvmbridge::attention", "tvmbridge::fused_attention"}


@dataclass(frozen=True)
class CodePlan:
    """The description of a compiled module; the fields are those of the classes named below.

    - ``inputs`` to ``autocast``: of CapturedGraph and Assumptions.
    - ``recorded`` to ``siblings``: of CompiledModule.
    - ``wholes``, ``num_results``: of Pieces; None: there are none.
    - ``primals`` to ``readers``: of SplitModule; empty in inference.
    - ``backward``: the digest of the backward graph; empty in inference.
    """

    inputs: tuple[InputDescriptor, ...]
    outputs: tuple[OutputDescriptor, ...]
    read: frozenset[str]
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
    def parse(cls, content: Any) -> CodePlan:
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
    return typing.get_type_hints(CodePlan)


def plan_of(compiled: CompiledModule) -> tuple[CodePlan, bytes]:
    """Return the plan of a module that was compiled just now, and its compressed backward graph.

    Raises:
        UndescribableError: something about the module cannot be described as data.
    """
    captured, parts = compiled.captured, compiled.split
    feature = next(iter(refused_features(compiled)), None)
    if feature is None and not (compiled.key and compiled.source):
        feature = "no code in the cache"
    if feature is not None:
        raise UndescribableError(feature)
    graph = b"" if parts is None else tvm.ir.save_json(parts.mod).encode()
    if len(graph) > MOST_GRAPH_BYTES:
        raise UndescribableError(f"a backward graph of {len(graph)} bytes")
    pieces = compiled.pieces
    assumed = captured.assumptions
    plan = CodePlan(
        inputs=captured.inputs,
        outputs=captured.outputs,
        read=captured.read_by_results(),
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


def refused_features(compiled: CompiledModule) -> Iterator[str]:
    """Yield the features of the code that a plan has no form for."""
    captured, convention = compiled.captured, compiled.captured.convention
    assumed = captured.assumptions
    features = {
        "frozen weights": compiled.freezing is not None,
        "random draws that read computed values": captured.prologue is not None,
        "functions that run eagerly after the code": captured.epilogue is not None,
        "tensors outside of the module": bool(captured.outside or assumed.foreign),
        "values of buffers or arguments that forward reads": any(
            answer.names or answer.arguments for answer in assumed.answers
        ),
        "weights that hooks compute": bool(assumed.normed),
        "attributes that forward sets": bool(convention.assigned or convention.left),
        "containers among the arguments that forward changes": bool(convention.changed_arguments),
        "checks of data": bool(convention.checks),
        "tensors in plain attributes": any(d.kind is InputKind.ATTRIBUTE for d in captured.inputs),
        "custom autograd functions": compiled.split is not None and bool(compiled.split.functions),
        "dimensions that are symbols": not _is_static(captured),
    }
    yield from (feature for feature, present in features.items() if present)
    for node in captured.program.graph.nodes:
        if node.op == "call_function" and not _is_known(node.target):
            yield f"the operator {node.target}"


def _is_static(captured: CapturedGraph) -> bool:
    specs = [d.spec for d in captured.inputs]
    specs += [o.spec for o in captured.outputs if o.spec is not None]
    return all(type(size) is int for spec in specs for size in (*spec.shape, *spec.stride))


def _is_known(target: Any) -> bool:
    """Whether the code of the operator that a node calls depends on its arguments alone."""
    if isinstance(target, OpOverload):
        return target.namespace == "aten" or target.name() in _ATTENTION
    return getattr(target, "__module__", "") == "_operator"

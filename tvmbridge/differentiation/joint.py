"""The choice between the two sources of the joint function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import InputKind, PassRecord
from tvmbridge.differentiation.aot import trace_joint
from tvmbridge.differentiation.differentiate import JointModule, differentiate
from tvmbridge.differentiation.facts import GradientFacts, gradient_facts
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.frontend import ImportedModule, import_graph
from tvmbridge.graph_capture.memory.layouts import Layout


@dataclass(frozen=True)
class Derivation:
    """A joint function and where it comes from.

    ``captured`` is the captured graph with the noise that the joint function takes; ``source`` is
    ``"relax"`` or ``"aot"``, and ``reason`` says why it is ``aot`` (empty for ``relax``).
    ``layouts`` are those of the gradients that eager PyTorch does not return contiguous, by number.
    ``facts`` are those of the rehearsal. ``traced`` is the graph that was recorded from PyTorch's
    autograd (None for ``relax``); its placeholders are the inputs and the state, the cotangents,
    and the draws in program order.
    """

    joint: JointModule
    captured: CapturedGraph
    imported: ImportedModule
    source: str
    reason: str
    layouts: Mapping[int, Layout]
    facts: GradientFacts
    traced: fx.GraphModule | None = None


def derive(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    captured: CapturedGraph,
    options: CompileOptions,
    records: list[PassRecord],
    facts: GradientFacts | None = None,
) -> Derivation:
    """The joint function of a captured module, from the source that ``options.joint`` names.

    ``auto`` takes TVM's Gradient where the captured graph says all that PyTorch knows of the
    gradient and every operator has an admitted rule, otherwise PyTorch's own derivatives. With
    ``facts`` given, forward is not rehearsed for them.

    Raises:
        NothingToDifferentiateError: no computed output requires a gradient.
        UnsupportedOperatorError: the module cannot be differentiated, or not by ``relax``; the
            message says why.
    """
    rehearsal = Rehearsal(module, args, kwargs, captured)
    facts = facts or gradient_facts(rehearsal)
    if options.joint == "aot":
        return _by_autograd(rehearsal, facts, "asked for", records)
    reason = "; ".join(facts.lost) or _complex_reason(captured)
    if not reason:
        trial: list[PassRecord] = []
        try:
            derivation = _by_relax(captured, facts, trial)
        except UnsupportedOperatorError as error:
            reason = str(error).split("; take joint=")[0]
        else:
            records.extend(trial)
            return derivation
    if options.joint == "relax":
        raise UnsupportedOperatorError(
            f"joint='relax' would not be exact: {reason}; take joint='aot' (or 'auto'), which "
            "uses PyTorch's own derivatives"
        )
    return _by_autograd(rehearsal, facts, reason, records)


def _complex_reason(captured: CapturedGraph) -> str:
    """Gradients of complex tensors are conjugated, which the rules for ATen calls do not do."""
    for node in captured.program.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, torch.Tensor) and value.is_complex():
                return f"{node.target} is of complex numbers"
    return ""


def _by_relax(
    captured: CapturedGraph, facts: GradientFacts, records: list[PassRecord]
) -> Derivation:
    imported = import_graph(captured)
    joint = differentiate(imported.mod, facts.wanted, facts.cotangent_of, records)
    if joint.cotangent_of != facts.cotangent_of:
        raise UnsupportedOperatorError(
            "PyTorch lets a gradient through outputs in which the captured graph shows none"
        )
    given = sum(d.kind is not InputKind.CONSTANT for d in captured.inputs)
    joint = replace(
        joint,
        gradient_reads=facts.gradient_reads,
        drawn=joint.primals[given:],
        saved=facts.saved,
    )
    return Derivation(joint, captured, imported, "relax", "", facts.layouts, facts)


def _by_autograd(
    rehearsal: Rehearsal, facts: GradientFacts, reason: str, records: list[PassRecord]
) -> Derivation:
    traced = trace_joint(rehearsal, facts, records)
    captured = replace(rehearsal.captured, noise=traced.noise)
    joint, imported, graph = traced.joint, traced.imported, traced.graph
    return Derivation(joint, captured, imported, "aot", reason, facts.layouts, facts, graph)

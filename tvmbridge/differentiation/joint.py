"""Derive the joint function by TVM's Gradient or, if that is not exact, by PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.calls.layouts import Layout
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.differentiation.aot import trace_joint
from tvmbridge.differentiation.differentiate import JointModule, differentiate
from tvmbridge.differentiation.facts import GradientFacts, gradient_facts
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.frontend import ImportedModule, import_graph


@dataclass(frozen=True)
class Derivation:
    """A joint function of forward and backward, and how it was derived.

    - ``joint``: the joint function with its calling convention.
    - ``captured``: the captured graph, with the random draws that the joint function takes.
    - ``imported``: the Relax module that the joint function was derived from.
    - ``source``: ``"relax"`` (TVM's Gradient) or ``"aot"`` (PyTorch's autograd).
    - ``reason``: why the source is ``"aot"``; empty for ``"relax"``.
    - ``layouts``: memory layouts of the gradients that eager PyTorch does not return contiguous,
      by the number of the gradient.
    - ``facts``: how eager PyTorch differentiates the module.
    - ``traced``: the graph recorded from PyTorch's autograd; None for ``"relax"``. Its placeholders
      are the primals, the cotangents, and the random draws in program order.
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
    """Derive the joint function of a captured module from the source in ``options.joint``.

    ``auto`` uses TVM's Gradient if the captured graph alone gives PyTorch's gradient and every
    operator has an admitted rule; otherwise it uses PyTorch's own derivatives.

    Args:
        facts: how eager PyTorch differentiates the module; None: replay forward to find out.

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
    """Name an operator with a complex result, or return an empty string if there is none.

    PyTorch conjugates gradients of complex tensors; the rules for ATen calls do not.
    """
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
    given = len(captured.primals)
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

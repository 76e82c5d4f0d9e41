"""Coloring: which bindings of the joint function run in forward, and what backward needs of them.

The forward color is everything the outputs depend on; the backward color everything else that the
gradients depend on, and those forward values that backward computes again. What backward reads of
forward's is a *residual*. A policy decides what backward computes rather than reads; each has a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from tvm import relax

from tvmbridge.coloring.graph import JointGraph, tensor_bytes
from tvmbridge.coloring.keep_casts import keep_casts
from tvmbridge.coloring.keep_operands import keep_operands
from tvmbridge.coloring.min_cut import min_cut
from tvmbridge.coloring.operators import check_names
from tvmbridge.coloring.recompute_cheap import recompute_cheap
from tvmbridge.coloring.save_all import save_all
from tvmbridge.core.decisions import Rule, decided
from tvmbridge.differentiation.differentiate import JointModule

Policy = Callable[[JointGraph], frozenset[relax.Var]]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "save_all": save_all,
        "recompute_cheap": recompute_cheap,
        "min_cut": min_cut,
        "keep_casts": keep_casts,
        "keep_operands": keep_operands,
    }
)
# Those of which a minimum cut is what decides.
_MINIMUM_CUTS = ("min_cut", "keep_casts", "keep_operands")


def policy_for(name: str, device: torch.device) -> str:
    """The key of :data:`POLICIES` that ``CompileOptions.residual_policy`` is on ``device``."""
    if name != "auto":
        return name
    return "keep_casts" if device.type == "cpu" else "keep_operands"


@dataclass(frozen=True)
class Coloring:
    """The colors of a joint function's bindings.

    ``forward`` lists bindings in program order, ``backward`` too, but for those that it repeats:
    they stand right before their first use, so that their results live no longer than needed.
    ``residuals`` are the forward values that backward reads, ``reads`` the primals that it reads,
    and ``drawn`` those of them that are random draws.
    """

    forward: tuple[relax.Binding, ...]
    backward: tuple[relax.Binding, ...]
    residuals: tuple[relax.Var, ...]
    reads: tuple[relax.Var, ...]
    drawn: tuple[relax.Var, ...] = ()

    @property
    def repeated(self) -> frozenset[relax.Var]:
        """Variables that forward computes, and backward again."""
        return frozenset(b.var for b in self.forward) & frozenset(b.var for b in self.backward)


def color(
    joint: JointModule, policy: str = "save_all", recompute: Collection[str] = ()
) -> Coloring:
    """Color ``joint``; inputs are passed to backward rather than captured, constants repeated.

    Args:
        joint: the joint function.
        policy: a key of :data:`POLICIES`.
        recompute: operators that minimum cuts may repeat besides the cheap ones.

    Raises:
        ValueError: ``recompute`` names something that is no operator.
        UnsupportedOperatorError: backward reads something of forward that is no tensor.
    """
    check_names(recompute)
    graph = JointGraph(joint, recompute if policy in _MINIMUM_CUTS else ())
    bindings = joint.mod["joint"].body.blocks[0].bindings
    chosen = decided(Rule.MIDDLE, lambda: _numbers(bindings, POLICIES[policy](graph)))
    repeated = frozenset(bindings[i].var for i in chosen)
    kept = graph.kept(repeated)
    forward = graph.with_forward(v for v in kept if v in graph.bound)
    return Coloring(
        forward=tuple(b for b in bindings if b.var in forward),
        backward=_backward(graph, list(bindings), repeated),
        residuals=tuple(v for v in graph.bound if v in kept),
        reads=tuple(p for p in graph.primals if p in kept),
        drawn=tuple(p for p in graph.primals if p in kept and p in graph.drawn),
    )


def _numbers(bindings: Sequence[relax.Binding], chosen: Collection[relax.Var]) -> list[int]:
    return [i for i, binding in enumerate(bindings) if binding.var in chosen]


def _backward(
    graph: JointGraph, bindings: list[relax.Binding], repeated: Collection[relax.Var]
) -> tuple[relax.Binding, ...]:
    """Backward's own bindings in program order, each behind what it reads and is repeated."""
    binding_of = {b.var: b for b in bindings}
    ordered: dict[relax.Var, None] = {}

    def place(var: relax.Var) -> None:
        pending = [(var, False)]
        while pending:
            current, ready = pending.pop()
            if ready:
                ordered.setdefault(current)
            elif current not in ordered:
                pending.append((current, True))
                read = [v for v in graph.operands[current] if v in repeated]
                pending.extend((v, False) for v in reversed(read))

    for var in graph.bound:
        if var in graph.backward:
            place(var)
    for gradient in graph.gradients:
        if gradient in repeated:
            place(gradient)
    return tuple(binding_of[v] for v in ordered)


__all__ = ["POLICIES", "Coloring", "JointGraph", "color", "policy_for", "tensor_bytes"]

"""Coloring: assign each binding of the joint function to forward, to backward, or to both.

The forward color has all bindings that the outputs depend on. The backward color has all other
bindings that the gradients depend on, and the forward bindings that backward computes again. A
forward value that is kept for backward is a *residual*. A policy chooses the values that backward
computes itself. A third color divides backward once more, into
the gradients of inputs and the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from tvm import relax

from tvmbridge.backends import backend_of
from tvmbridge.coloring.budget import Recomputation, predicted, within_budget
from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.keep_operands import keep_casts, keep_operands
from tvmbridge.coloring.min_cut import min_cut
from tvmbridge.coloring.operators import check_names, is_view
from tvmbridge.coloring.save_all import recompute_cheap, save_all
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
# The policies that solve a minimum cut.
_MINIMUM_CUTS = ("min_cut", "keep_casts", "keep_operands")


def policy_for(name: str, device: torch.device) -> str:
    """Resolve ``CompileOptions.residual_policy`` on ``device`` to a key of :data:`POLICIES`."""
    if name != "auto":
        return name
    return backend_of(device).residual_policy


@dataclass(frozen=True)
class Coloring:
    """The bindings of a joint function, divided into forward and backward.

    - ``forward``: the bindings that forward runs, in program order.
    - ``backward``: the bindings that backward runs, in program order, except that a repeated
      binding comes right before its first use: this keeps the lifetime of its result short.
    - ``residuals``: the forward values that backward reads.
    - ``reads``: the primals that backward reads.
    - ``drawn``: the primals that backward reads and that are random draws.
    - ``recomputation``: the choice under a memory budget; None without one.
    """

    forward: tuple[relax.Binding, ...]
    backward: tuple[relax.Binding, ...]
    residuals: tuple[relax.Var, ...]
    reads: tuple[relax.Var, ...]
    drawn: tuple[relax.Var, ...] = ()
    recomputation: Recomputation | None = None

    @property
    def repeated(self) -> frozenset[relax.Var]:
        """The variables that both forward and backward compute."""
        return frozenset(b.var for b in self.forward) & frozenset(b.var for b in self.backward)


def color(
    joint: JointModule,
    policy: str = "save_all",
    recompute: Collection[str] = (),
    memory_budget: float | None = None,
) -> Coloring:
    """Divide the bindings of ``joint`` into forward and backward, as a policy chooses.

    Args:
        policy: a key of :data:`POLICIES`.
        recompute: operators that backward may compute again in addition to the cheap ones; used
            by the policies that solve a minimum cut.
        memory_budget: the fraction of the bytes kept by ``save_all`` that residuals may take; None:
            no limit.

    Raises:
        ValueError: a name in ``recompute`` is not an operator, or must not be repeated.
        UnsupportedOperatorError: backward reads a forward value that is not a tensor.
    """
    check_names(recompute)
    graph = JointGraph(joint, recompute if policy in _MINIMUM_CUTS else ())
    bindings = joint.mod["joint"].body.blocks[0].bindings

    def choose() -> list[int]:
        repeated = POLICIES[policy](graph)
        if memory_budget is not None:
            repeated = within_budget(joint, repeated, recompute, memory_budget)
        return [i for i, binding in enumerate(bindings) if binding.var in repeated]

    chosen = decided(Rule.MIDDLE, choose)
    repeated = frozenset(bindings[i].var for i in chosen)
    if memory_budget is not None:
        graph = JointGraph(joint, recompute, whatever=True)
    coloring = _divided(graph, list(bindings), repeated)
    if memory_budget is None:
        return coloring
    return replace(coloring, recomputation=predicted(joint, repeated, memory_budget))


def color_backward(joint: JointModule) -> Coloring:
    """Divide a backward function into the gradients of inputs and the gradients of weights.

    The forward color has all bindings that the gradients of inputs depend on, and the backward
    color has all other bindings. Only rearrangements, fills and constants are in both: no value is
    computed twice. The residuals are the values that the gradients of weights read.

    Args:
        joint: the backward function. Its primals are all its parameters, its outputs are the
            gradients of inputs, and its gradients are those of weights.

    Raises:
        UnsupportedOperatorError: a gradient of weights reads a value that is not a tensor.
    """
    graph = JointGraph(joint)
    free = {v for v in graph.forward if is_view(graph.bound[v]) or _is_tuple(graph.bound[v])}
    bindings = joint.mod["joint"].body.blocks[0].bindings
    return _divided(graph, list(bindings), graph.early | free)


def _is_tuple(value: relax.Expr) -> bool:
    return isinstance(value, relax.Tuple)


def _divided(
    graph: JointGraph, bindings: list[relax.Binding], repeated: Collection[relax.Var]
) -> Coloring:
    """Return the coloring in which backward computes ``repeated`` itself."""
    kept = graph.kept(repeated)
    forward = graph.with_forward(v for v in kept if v in graph.bound)
    return Coloring(
        forward=tuple(b for b in bindings if b.var in forward),
        backward=_backward(graph, bindings, repeated),
        residuals=tuple(v for v in graph.bound if v in kept),
        reads=tuple(p for p in graph.primals if p in kept),
        drawn=tuple(p for p in graph.primals if p in kept and p in graph.drawn),
    )


def _backward(
    graph: JointGraph, bindings: list[relax.Binding], repeated: Collection[relax.Var]
) -> tuple[relax.Binding, ...]:
    """Return the bindings of backward: repeated ones right before their first use."""
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


__all__ = [
    "POLICIES",
    "Coloring",
    "JointGraph",
    "Recomputation",
    "color",
    "color_backward",
    "policy_for",
]

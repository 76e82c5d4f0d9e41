"""HorizontalFusion: N equal chains on slices of one tensor become one chain.

    x_0, x_1, x_2 = split(x, 64, 1)              s = unflatten(x, 1, [3, 64])
    y_i = layer_norm(x_i, [64], w_i, b_i)   ->   n = layer_norm(s, [64])
    z_i = tanh(y_i)                              t = tanh(addcmul(stack(b), n, stack(w)))
    cat([z_0, z_1, z_2], 1)                      flatten(t, 1, 2)

Requires: ATen operators with fake values, as torch.export leaves them. Guarantees: the N modules
keep their parameters, which get their gradients: the graph stacks the chains' weights at each
call. Random draws keep their order: in training each dropout draws its own mask, at its place.
Runs after CombineSparseInputs, before OverlapCommunication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from tvmbridge.core.pass_report import PassReport
from tvmbridge.passes.fx.base import FxPass, known, value_of
from tvmbridge.passes.fx.costs import Costs
from tvmbridge.passes.fx.fused_chains import fuse_all
from tvmbridge.passes.fx.slices import Slice, groups, slices_of
from tvmbridge.passes.fx.stacking import NotStackedError
from tvmbridge.passes.fx.starts import Slices


@dataclass(frozen=True)
class HorizontalFusion(FxPass):
    """Fuse N equal chains of operators, on slices of one tensor, into one chain.

    Args:
        least: the smallest number of chains that is fused.
        costs: the time of a launch and of a copied byte; a fusion that would cost more than it
            saves is declined. None: the costs of the device's type.
    """

    least: int = 2
    costs: Costs | None = None

    def applies(self, graph_module: fx.GraphModule) -> bool:
        """Whether the same operators read at least ``least`` slices of one tensor."""
        return bool(self._candidates(graph_module.graph))

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Fuse the chains that begin at equal slices of one tensor, group by group."""
        graph = graph_module.graph
        candidates = [
            (f"{len(each)} slices of {each[0].source.name}", partial(_start, each))
            for each in self._candidates(graph)
        ]
        fuse_all(graph, candidates, self.costs, report, "all chains")

    def _candidates(self, graph: fx.Graph) -> list[list[Slice]]:
        """Return groups of equal slices that the same operators read."""
        found = []
        for group in groups(list(slices_of(graph))):
            alike: dict[Any, list[Slice]] = {}
            for each in group:
                uses = _uses(each.node, 4)
                if uses:
                    alike.setdefault(uses, []).append(each)
            found += [each for each in alike.values() if len(each) >= self.least]
        return found


def _start(slices: Sequence[Slice], touched: frozenset[fx.Node]) -> Slices:
    if any(each.node in touched for each in slices):
        raise NotStackedError("they are written in place")
    return Slices(slices)


def _uses(node: fx.Node, depth: int) -> tuple[Any, ...]:
    """Describe the operators that read a node, up to ``depth`` of them in a chain.

    Equal chains have equal descriptions.
    """
    users = [u for u in node.users if u.op == "call_function" and len(u.all_input_nodes) < 8]
    if not depth or not users:
        return ()
    forms = [(str(u.target), _constants(u), _uses(u, depth - 1)) for u in users]
    return tuple(sorted(forms, key=repr))


def _constants(node: fx.Node) -> str:
    return repr(fx.map_arg((node.args, node.kwargs), lambda n: _form(value_of(n))))


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "?"
    sizes = [size if isinstance(size, int) else "?" for size in map(known, value.shape)]
    return f"{sizes}{value.dtype}"

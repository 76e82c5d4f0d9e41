"""Siblings: which outputs of a captured graph other outputs are computed from."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.reached import reached


def siblings_of(captured: CapturedGraph, differentiable: Collection[int]) -> dict[int, set[int]]:
    """Return, for each output that other outputs are computed from, their numbers."""
    nodes = {n.name: n for n in captured.program.graph.nodes}
    names = [o.name for o in captured.outputs if o.is_computed]
    number_of = {nodes[names[i]]: i for i in differentiable if names[i] in nodes}
    readers: dict[int, set[int]] = {}
    for node, number in number_of.items():
        for other in _operands(node):
            found = number_of.get(other)
            if found is not None and found != number and other.op == "call_function":
                readers.setdefault(found, set()).add(number)
    return readers


def _operands(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that ``node`` is computed from and that gradients flow to."""

    def inputs(reader: fx.Node) -> list[fx.Node]:
        values = [(n, n.meta.get("val")) for n in reader.all_input_nodes]
        return [n for n, v in values if not isinstance(v, torch.Tensor) or v.is_floating_point()]

    return set(reached(inputs(node), inputs))

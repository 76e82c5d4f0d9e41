"""Siblings: outputs that other outputs are computed from.

In eager PyTorch ``features, logits = model(x)`` are connected: the gradient of ``logits`` flows
through ``features``, where ``retain_grad`` and hooks see it (Grad-CAM, attention maps). Compiled
code is one step to autograd, and its outputs stand side by side: such a hook would silently see
less than in eager, so backward refuses instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from tvmbridge.errors import BridgeError
from tvmbridge.types import CapturedGraph

_UNSEEN = (
    "output {number} of a dispatched module has a hook or retain_grad, and another output is "
    "computed from it: tvmbridge's compiled code does not hand over the gradient that flows "
    "between them. Dispatch the submodules before and behind that output, each for itself, or "
    "call remove_tvm_dispatch(module)"
)


def readers_of(captured: CapturedGraph, differentiable: Collection[int]) -> dict[int, set[int]]:
    """For each computed output that others are computed from, by number: which.

    Args:
        captured: the graph.
        differentiable: the numbers of the outputs that gradients arrive for.
    """
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
    """What ``node`` is computed from, as far as gradients flow."""
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        operand = waiting.pop()
        value = operand.meta.get("val")
        stops = isinstance(value, torch.Tensor) and not value.is_floating_point()
        if operand not in found and not stops:
            found.add(operand)
            waiting += operand.all_input_nodes
    return found


class Watched:
    """The outputs of one call that others are computed from."""

    def __init__(
        self, outputs: Sequence[torch.Tensor], readers: Mapping[int, Collection[int]]
    ) -> None:
        self._readers = readers
        self._outputs = {number: weakref.ref(outputs[number]) for number in readers}

    def refuse_hooks(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        """Refuse hooks that miss a gradient.

        Raises:
            BridgeError: one is on an output, and a cotangent arrived for one that reads it.
        """
        for number, reference in self._outputs.items():
            output = reference()
            if output is None or not (output.retains_grad or output._backward_hooks):
                continue
            if any(cotangents[reader] is not None for reader in self._readers[number]):
                raise BridgeError(_UNSEEN.format(number=number))

"""Siblings: outputs that other outputs are computed from.

In eager PyTorch ``features, logits = model(x)`` are connected: the gradient of ``logits`` flows
through ``features``, where ``retain_grad`` and hooks see it (Grad-CAM, attention maps). Compiled
code is a single node to autograd, so no gradient flows from one output to another. A hook would
silently see less than in eager PyTorch. Backward raises an error instead, also if a gradient with
respect to such an output is requested.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from types import FrameType

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tvmbridge.core.errors import LEAVE_TO_EAGER, BridgeError
from tvmbridge.core.torch_private import engine_run_backward

# Its arguments: the outputs, then cotangents, retain_graph, create_graph, inputs.
_STARTS_BACKWARD = engine_run_backward.__code__
_is_leaf = attrgetter("is_leaf")
_UNSEEN = (
    "output {number} of a dispatched module has a hook or retain_grad, and another output is "
    "computed from it: tvmbridge's compiled code does not hand over the gradient that flows "
    "between them. Dispatch the submodules before and behind that output, each for itself, or "
    f"{LEAVE_TO_EAGER}"
)
_NO_PATH = (
    "a gradient is asked for by output {number} of a dispatched module, which another output is "
    "computed from: tvmbridge's compiled code does not hand over the gradient that flows between "
    "them. Dispatch the submodules before and behind that output, each for itself, or "
    f"{LEAVE_TO_EAGER}"
)


class Watched:
    """Watches the outputs of one call that other outputs are computed from.

    Args:
        readers: for each watched output, the numbers of the outputs computed from it.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], readers: Mapping[int, Collection[int]]
    ) -> None:
        self._readers = readers
        self._outputs = {number: weakref.ref(outputs[number]) for number in readers}
        for reader in set().union(*readers.values()):
            outputs[reader].register_hook(_InputsWatch(self, reader))

    def refuse_hooks(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        """Raise if a hook on a watched output would miss a gradient."""
        for number, reference in self._outputs.items():
            output = reference()
            if output is None or not (output.retains_grad or _has_hooks(output)):
                continue
            if any(cotangents[reader] is not None for reader in self._readers[number]):
                raise BridgeError(_UNSEEN.format(number=number))

    def refuse_inputs(self, reader: int) -> None:
        """Raise if ``torch.autograd.grad`` is called with an input that ``reader`` depends on.

        The gradient would miss the part that flows through ``reader``. The compiled backward
        does not run in that case, so a hook of ``reader`` makes this check.
        """
        inputs = _inputs_of_backward()
        if _are_leaves(inputs):
            return
        for asked in inputs:
            edge = asked if isinstance(asked, GradientEdge) else get_gradient_edge(asked)
            number = edge.output_nr
            if getattr(edge.node, "watched", None) is self and reader in self._readers.get(
                number, ()
            ):
                raise BridgeError(_NO_PATH.format(number=number))


def _are_leaves(inputs: Sequence[torch.Tensor | GradientEdge]) -> bool:
    """Whether all ``inputs`` are leaves; it is fast for the common case of many parameters."""
    try:
        return all(map(_is_leaf, inputs))
    except AttributeError:  # a GradientEdge has no is_leaf
        return False


class _InputsWatch:
    """A hook of an output that is computed from others; it checks, and changes no gradient."""

    # Without it, pickling the output would warn that its hooks are lost.
    __torch_unserializable__ = True

    def __init__(self, watched: Watched, reader: int) -> None:
        self._watched = watched
        self._reader = reader

    def __call__(self, cotangent: torch.Tensor | None) -> None:
        if cotangent is not None:
            self._watched.refuse_inputs(self._reader)


def _has_hooks(output: torch.Tensor) -> bool:
    hooks = output._backward_hooks or {}
    return not all(isinstance(hook, _InputsWatch) for hook in hooks.values())


def _inputs_of_backward() -> Sequence[torch.Tensor | GradientEdge]:
    """Return the ``inputs`` argument of the running backward; empty for ``loss.backward()``.

    PyTorch has no function for it. The frame that started the backward in this thread has it
    among its arguments.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STARTS_BACKWARD:
            return tuple(frame.f_locals["args"][3])
        frame = frame.f_back
    return ()

"""Hooks on outputs: called only if a gradient arrives, although all outputs share a node.

In eager PyTorch each output has its own autograd node, which does not run if no gradient reaches
it. Compiled code has one node for all outputs. It runs if any gradient arrives, and PyTorch would
call the hooks of the other outputs with None.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import graph
from torch.utils.hooks import unserializable_hook

from tvmbridge.runtime import siblings


class _HooksOfOutput(OrderedDict[int, Callable[..., Any]]):
    """The hooks of one output by handle number; added hooks are wrapped to ignore None."""

    def __setitem__(self, number: int, hook: Callable[..., Any]) -> None:
        # Multi-tensor hooks of torch.autograd.graph count calls with None as well, and the hooks
        # of siblings.py handle None.
        takes_none = getattr(hook, "__module__", None) in (graph.__name__, siblings.__name__)
        super().__setitem__(number, hook if takes_none else _where_it_arrives(hook))


def _where_it_arrives(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else hook(gradient)

    if hasattr(hook, "__torch_unserializable__"):
        unserializable_hook(called)
    return called


def let_hooks_wait(outputs: Iterable[torch.Tensor]) -> None:
    """Prepare new ``outputs`` of one node, so that later hooks are called as in eager PyTorch."""
    for output in outputs:
        if output.grad_fn is not None:
            # The same steps as Tensor.register_hook at the first hook.
            output._backward_hooks = _HooksOfOutput()
            output.grad_fn._register_hook_dict(output)

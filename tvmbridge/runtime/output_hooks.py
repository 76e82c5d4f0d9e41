"""Hooks on outputs: called where a gradient arrives, though all outputs are of one autograd node.

In eager PyTorch every output has a node of its own, which does not run where no gradient reaches
it. The node of compiled code runs for all, and PyTorch would call the hooks of the others with
None.
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
    """The hooks of one output, by the numbers of their handles."""

    def __setitem__(self, number: int, hook: Callable[..., Any]) -> None:
        # A hook on several tensors waits for all whose nodes run; our own knows of None.
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
    """Have hooks that will be put on ``outputs``, fresh ones of one node, called as in eager."""
    for output in outputs:
        if output.grad_fn is not None:
            # What Tensor.register_hook does at the first hook.
            output._backward_hooks = _HooksOfOutput()
            output.grad_fn._register_hook_dict(output)

"""Calls that Dynamo writes in its own way, as a line of Python would have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from tvmbridge.core.torch_private import enter_autocast, exit_autocast, tag_activation_checkpoint


def enter(*args: Any) -> torch.autocast:
    """Begin a region of autocast, as ``with torch.autocast(*args)`` does."""
    region = torch.autocast(*args)
    region.__enter__()
    return region


def leave(region: torch.autocast) -> None:
    """End a region of autocast."""
    region.__exit__(None, None, None)


_SPELLED: dict[Callable[..., Any], Callable[..., Any]] = {
    enter_autocast: enter,
    exit_autocast: leave,
    tag_activation_checkpoint: checkpoint,
}


def as_python_writes(graph: fx.Graph) -> None:
    """Have ``graph`` call what a forward would call, which captures are made for.

    They are regions of autocast and checkpoints.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SPELLED:
            node.target = _SPELLED[node.target]

"""Calls that Dynamo writes in its own way, as a line of Python would have them."""

from __future__ import annotations

import enum
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

# How an object of a subclass becomes one of the class itself, past methods of the subclass.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}


def as_python_writes(graph: fx.Graph) -> None:
    """Have ``graph`` call what a forward would call, which captures are made for.

    Regions of autocast and checkpoints have other functions there. PyTorch writes the text of a
    graph by the ``repr`` of its constants, so that these become literals here.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SPELLED:
            node.target = _SPELLED[node.target]
        node.args = fx.node.map_aggregate(node.args, _literal)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _literal)


def _literal(value: Any) -> Any:
    """``value``; a plain string or number where it is one of a subclass with another ``repr``."""
    if isinstance(value, enum.Enum) or type(value) is bool:
        return value
    kind = next((k for k in _PLAIN if isinstance(value, k)), None)
    return value if kind is None or type(value) is kind else _PLAIN[kind](value)

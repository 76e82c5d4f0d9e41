"""Replace functions that Dynamo puts into graphs by the functions that user code calls."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from tvmbridge.core.torch_private import enter_autocast, exit_autocast, tag_activation_checkpoint


def enter(*args: Any) -> torch.autocast:
    """Enter a region of autocast, as ``with torch.autocast(*args)`` does, and return it."""
    region = torch.autocast(*args)
    region.__enter__()
    return region


def leave(region: torch.autocast) -> None:
    """Leave a region of autocast."""
    region.__exit__(None, None, None)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.data``."""
    return tensor.data


def assign_data(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Assign to ``tensor.data``; return ``tensor``."""
    tensor.data = value
    return tensor


def itself(value: Any) -> Any:
    """Return ``value``: an assignment to ``.data`` leaves the version of the tensor as it is."""
    return value


# By the name of a function of TorchDynamo, which does a part of what user code writes.
_NAMED: dict[str, Callable[..., Any]] = {
    "_get_data_attr": data_of,
    "set_": assign_data,
    "_lower_version_count_by_1": itself,
}
_SPELLED: dict[Callable[..., Any], Callable[..., Any]] = {
    enter_autocast: enter,
    exit_autocast: leave,
    tag_activation_checkpoint: checkpoint,
}

# Functions that convert an object of a subclass to the class itself, without methods of the
# subclass.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}


def as_python_writes(graph: fx.Graph) -> None:
    """Change ``graph`` in place to call the functions that user code would call.

    Dynamo uses other functions for regions of autocast and for checkpoints, but the capture handles
    the functions of user code. PyTorch generates the code of a graph by the ``repr`` of its
    constants. So constants of subclasses of ``str``, ``int`` and ``float`` become plain constants.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SPELLED:
            node.target = _SPELLED[node.target]
        elif node.op == "call_function":
            name = getattr(node.target, "__name__", "")
            node.target = _NAMED.get(name.rpartition(".")[2], node.target)
        node.args = fx.node.map_aggregate(node.args, _literal)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _literal)


def _literal(value: Any) -> Any:
    """Return ``value``; if its class is a subclass of str, int or float, return a plain one."""
    if isinstance(value, enum.Enum) or type(value) is bool:
        return value
    kind = next((k for k in _PLAIN if isinstance(value, k)), None)
    return value if kind is None or type(value) is kind else _PLAIN[kind](value)

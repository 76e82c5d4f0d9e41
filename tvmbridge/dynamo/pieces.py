"""Writes that a graph of TorchDynamo cannot be compiled with: the graph is cut before and behind.

Before::

    graph(x, mask, v): y = v.log(); x[mask] = y; return x.sin()

After::

    piece_0(v): v.log()    write(x, mask, y): x[mask] = y    piece_2(x): x.sin()

How many elements a mask chooses is known in a call alone, and a tensor that carries a gradient is
written by PyTorch, whose autograd notes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module


class _Piece(nn.Module):
    """What runs in place of a piece of a graph."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = run


def in_pieces(
    graph_module: fx.GraphModule, serve: Callable[[fx.GraphModule], Callable[..., Any]]
) -> Callable[..., Any] | None:
    """The graph in pieces, with ``serve(piece)`` in place of each; None: nothing cuts it."""
    numbers: dict[fx.Node, int] = {}
    number = 0
    for node in graph_module.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            number += (number % 2 == 1) != is_write_by_itself(node)
            numbers[node] = number
    if not number:
        return None
    split = split_module(
        graph_module, graph_module, lambda node: numbers.get(node, 0), keep_original_order=True
    )
    for number in sorted(set(numbers.values())):
        piece = getattr(split, f"submod_{number}")
        if number % 2 == 0:
            setattr(split, f"submod_{number}", _Piece(serve(piece)))
    run: Callable[..., Any] = split.forward
    return run


def is_write_by_itself(node: fx.Node) -> bool:
    """Whether a node is a write that PyTorch must make."""
    return _writes(node) and (_chooses_by_mask(node) or _carries_a_gradient(node.args[0]))


def _writes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = str(name).endswith("_") and not str(name).endswith("__")
    return node.target is operator.setitem or in_place


def _chooses_by_mask(node: fx.Node) -> bool:
    """Whether it writes as many values as a mask has elements that are true."""
    if len(node.args) < 3:
        return False
    where, value = node.args[1:3]
    return not _is_one(value) and any(_is_mask(each) for each in _nodes_in(where))


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _nodes_in(each)


def _is_mask(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.dtype in (torch.bool, torch.uint8)


def _is_one(value: Any) -> bool:
    """Whether it is one number, which any number of elements may become."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else value
    return not isinstance(example, torch.Tensor) or all(
        type(size) is int and size == 1 for size in example.shape
    )


def _carries_a_gradient(written: Any) -> bool:
    """Whether it is an argument of the graph that earlier lines have computed."""
    if not isinstance(written, fx.Node) or written.op != "placeholder":
        return False
    example = written.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.requires_grad and not example.is_leaf

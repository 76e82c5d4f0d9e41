"""The parts of forward that PyTorch runs, its prologue and its epilogue, in code for any size.

Both are FX graphs that run in eager PyTorch at each call, on tensors of any size. One graph serves
all sizes if no number in it depends on a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.symbolic.sizes import DifferentCodeError


def refuse_other_eager_parts(captured: Sequence[CapturedGraph]) -> None:
    """Raise DifferentCodeError if the eager parts of a module, captured at several sizes, differ.

    Args:
        captured: the graphs of the module at all sample shapes.
    """
    described = [(_prologue(each), _epilogue(each)) for each in captured]
    if any(other != described[0] for other in described[1:]):
        raise DifferentCodeError("a part of it that PyTorch runs depends on the size")


def _prologue(captured: CapturedGraph) -> Any:
    prologue = captured.prologue
    if prologue is None:
        return None
    if prologue.module.graph.find_nodes(op="get_attr"):
        raise DifferentCodeError("its random draws read tensors that forward makes for one size")
    return prologue.reads, _described(prologue.module.graph)


def _epilogue(captured: CapturedGraph) -> Any:
    epilogue = captured.epilogue
    return None if epilogue is None else (epilogue.num_read, _described(epilogue.graph))


def _described(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return the calls of a graph, with a text for the result of each earlier call."""
    numbers: dict[fx.Node, str] = {}
    found: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        given = map_arg((node.args, node.kwargs), numbers.__getitem__)
        numbers[node] = f"%{len(numbers)}"
        target = "" if node.op == "placeholder" else node.target
        found.append((node.op, target, repr(given)))
    return found

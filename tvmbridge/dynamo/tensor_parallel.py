"""Run a graph with DTensors as compiled local parts, with PyTorch's collectives between them.

PyTorch's own tracing (AOTAutograd) writes operators on DTensors as operators on local tensors and
functional collectives. It does so for forward and for backward::

    y = linear(x, weight)               # weight is a DTensor, a part of which is on each rank
 -> a = mm(x, local); b = all_reduce(a, "sum", group); y = wait_tensor(b)

All ranks begin the same collectives in the same order, which is eager PyTorch's: a rank that runs
the module's own forward matches the others. A capture sends nothing, because it runs on fake
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.sharding import is_distributed
from tvmbridge.core.torch_private import aot_autograd, save_all_partition
from tvmbridge.dynamo.pieces import in_pieces
from tvmbridge.passes.fx.overlap_communication import OverlapCommunication

_Run = Callable[..., Any]


def has_distributed_inputs(graph_module: fx.GraphModule) -> bool:
    """Whether an input of a graph of Dynamo is a DTensor."""
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return any(is_distributed(node.meta.get("example_value")) for node in inputs)


def in_local_parts(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    serve: Callable[[fx.GraphModule], _Run],
) -> _Run:
    """Return a function that runs the graph, and its backward, in local parts.

    Args:
        graph_module: a graph of Dynamo.
        example_inputs: its inputs at the capture.
        serve: returns the function that runs a part, which has plain tensors alone.

    Raises:
        Exception: PyTorch cannot trace the graph, whatever the error is.
    """

    def compiled(local: fx.GraphModule, _: Sequence[Any]) -> _Run:
        run = in_pieces(_overlapped(local), serve, always=True)
        assert run is not None
        return _boxed(run)

    made: _Run = aot_autograd()(
        fw_compiler=compiled, bw_compiler=compiled, partition_fn=save_all_partition()
    )(graph_module, example_inputs)
    return made


def _overlapped(local: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with requests of collectives early, and their waits late."""
    local.graph.eliminate_dead_code()
    for node in local.graph.nodes:
        # Dynamo's graphs have their fake values under another name.
        node.meta.setdefault("example_value", node.meta.get("val"))
    overlap = OverlapCommunication(check=False, split=False)
    return overlap.apply(local, PassReport()).graph_module


def _boxed(run: _Run) -> _Run:
    """Return ``run`` as AOTAutograd calls it, with a list of the arguments."""

    def call(args: list[Any]) -> Any:
        given = tuple(args)
        args.clear()
        return run(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call

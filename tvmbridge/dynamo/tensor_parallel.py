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
from contextlib import nullcontext
from typing import Any

from torch import fx

from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.sharding import is_distributed
from tvmbridge.core.torch_private import (
    aot_autograd,
    disable_current_modes,
    dispatch_mode_count,
    save_all_partition,
)
from tvmbridge.dynamo.pieces import in_pieces
from tvmbridge.passes.fx.effects import draws
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
    # Imported here because PyTorch's AOTAutograd takes a third of a second.
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    def forward(local: fx.GraphModule, _: Sequence[Any]) -> _Run:
        local.graph.eliminate_dead_code()
        run = _parts(local, serve)

        def call(*args: Any) -> Any:
            # Calls under a user's mode do not come here. PyTorch checks the aliasing of custom
            # operators at the first call, by a mode under which no compiled code would run.
            with disable_current_modes() if dispatch_mode_count() else nullcontext():
                return run(*args)

        return make_boxed_func(call)

    def backward(local: fx.GraphModule, _: Sequence[Any]) -> _Run:
        # PyTorch leaves operators of forward in it that nothing reads, and which would draw again.
        local.graph.eliminate_dead_code(lambda node: node.is_impure() and not draws(node))
        return make_boxed_func(_parts(local, serve))

    made: _Run = aot_autograd()(
        fw_compiler=forward, bw_compiler=backward, partition_fn=save_all_partition()
    )(graph_module, example_inputs)
    return made


def _parts(local: fx.GraphModule, serve: Callable[[fx.GraphModule], _Run]) -> _Run:
    """Return a function that runs a graph of local operators and collectives in parts.

    Requests of collectives come early in it, and their waits late.
    """
    for node in local.graph.nodes:
        # Dynamo's graphs have their fake values under another name.
        node.meta.setdefault("example_value", node.meta.get("val"))
    overlap = OverlapCommunication(check=False, split=False)
    run = in_pieces(overlap.apply(local, PassReport()).graph_module, serve, always=True)
    assert run is not None
    return run


def shared_key(part: fx.GraphModule) -> tuple[Any, ...] | None:
    """Return a key that is equal for parts of the same code and inputs.

    None: the part has constants, or sizes that are symbols.
    """
    if any(node.op in ("get_attr", "call_module") for node in part.graph.nodes):
        return None
    values = [node.meta.get("example_value") for node in part.graph.find_nodes(op="placeholder")]
    if not all(type(size) is int for value in values for size in getattr(value, "shape", (None,))):
        return None
    return part.code, *((v.dtype, v.device, tuple(v.shape), v.stride()) for v in values)

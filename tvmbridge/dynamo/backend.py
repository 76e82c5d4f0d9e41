"""The backends that ``torch.compile`` finds by name, through ``torch_dynamo_backends``.

``torch_dynamo_backends`` is the group of package entry points that PyTorch searches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tvmbridge.core.errors import first_line
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.torch_private import guard_global_hooks, skipped_frame
from tvmbridge.dynamo.calls import CompiledGraph, EagerGraph
from tvmbridge.dynamo.graphs import DynamoGraph, read_graph
from tvmbridge.dynamo.report import forget, keep
from tvmbridge.dynamo.stops import captured_graph, differentiated_graph
from tvmbridge.dynamo.strides import node_with_other_strides
from tvmbridge.dynamo.tensor_parallel import has_distributed_inputs, in_local_parts
from tvmbridge.graph_capture.observe.hooks import GLOBAL_HOOK_DICTS

logger = logging.getLogger(__name__)

# A call of compiled code has the overhead of a few eager operators.
_SMALLEST_GRAPH = 3

Called = Callable[..., Any]


@dataclass(frozen=True)
class BackendOptions:
    """The ``options`` that ``torch.compile`` passes to the backend.

    - ``compile``: the options of the compilation.
    - ``smallest_graph``: graphs with fewer operators run in eager PyTorch.
    """

    compile: CompileOptions
    smallest_graph: int = _SMALLEST_GRAPH

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> BackendOptions:
        """Return the options for ``given``: fields of CompileOptions, and ``smallest_graph``.

        Raises:
            TypeError: a field is unknown, or ``smallest_graph`` is no int.
            ValueError: a field's value is not among its choices, or does not apply to Dynamo.
        """
        fields = dict(given or {})
        smallest = fields.pop("smallest_graph", _SMALLEST_GRAPH)
        if type(smallest) is not int:
            raise TypeError(f"smallest_graph must be an int, not {type(smallest).__name__}")
        options = CompileOptions.of(fields)
        if options.freeze:
            raise ValueError("freeze is for add_tvm_dispatch: Dynamo does not guard values")
        if options.regions != "whole":
            raise ValueError("regions is for add_tvm_dispatch: a graph of Dynamo has no blocks")
        return cls(options, smallest)


def tvmbridge(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Called:
    """Compile a graph of Dynamo by TVM, at its first call.

    Args:
        graph_module: the graph.
        example_inputs: the inputs of the capture. If a DTensor is among them, the parts of the
            graph between collectives are compiled, of forward and of backward.
        options: fields of :class:`CompileOptions`, and ``smallest_graph``.
        mode: must be None, since the modes of ``torch.compile`` are for Inductor.

    Returns:
        The function that Dynamo calls in place of the graph.

    Raises:
        TypeError: an option is unknown or has the wrong type.
        ValueError: an option has a value that is not among its choices, or ``mode`` is given.
    """
    if has_distributed_inputs(graph_module):
        return in_local_parts(
            graph_module,
            example_inputs,
            lambda part: keep(_called(part, options, mode, CompiledGraph)),
        )
    return keep(_called(graph_module, options, mode, CompiledGraph))


def _called(
    graph_module: fx.GraphModule,
    options: Mapping[str, Any] | None,
    mode: str | None,
    compiled: Callable[[DynamoGraph, CompileOptions], CompiledGraph],
) -> CompiledGraph | EagerGraph:
    chosen = BackendOptions.of(options)
    if mode is not None:
        raise ValueError(f"mode={mode!r} is not known to tvmbridge; give options instead")
    return graph_on_code(graph_module, chosen, compiled)


def graph_on_code(
    graph_module: fx.GraphModule,
    chosen: BackendOptions,
    compiled: Callable[[DynamoGraph, CompileOptions], CompiledGraph] = CompiledGraph,
) -> CompiledGraph | EagerGraph:
    """Return the object that runs a graph of Dynamo: compiled at its first call, or eagerly.

    Args:
        compiled: creates the object that compiles the graph.

    Raises:
        SkipFrame: Dynamo assumed other strides than eager PyTorch has.
    """
    _check_strides(graph_module)
    _watch_global_hooks()
    try:
        graph = read_graph(graph_module)
    except Exception as error:
        # PyTorch can run the graph, whatever the error is.
        logger.warning("a graph of torch.compile runs in eager PyTorch", exc_info=True)
        return EagerGraph("graph", 0, _forward_of(graph_module), first_line(error))
    if graph.operators < chosen.smallest_graph:
        reason = f"it has fewer than {chosen.smallest_graph} operators"
        forward = _forward_of(graph_module)
        return EagerGraph(graph.name, graph.operators, forward, reason, small=True)
    return compiled(graph, chosen.compile)


def _forward_of(graph_module: fx.GraphModule) -> Called:
    """Return the forward of a graph, which runs none of the hooks of all modules.

    PyTorch generates a graph's code at first use. Until then ``forward`` calls the graph as a
    module, with these hooks.
    """
    assert graph_module.code
    return graph_module.forward


def _check_strides(graph_module: fx.GraphModule) -> None:
    """Refuse a graph for which Dynamo assumed other strides than eager PyTorch has.

    Raises:
        SkipFrame: the strides differ; Dynamo then runs the function in eager PyTorch.
    """
    try:
        node = node_with_other_strides(graph_module)
    except Exception:
        logger.debug("strides of a graph cannot be compared", exc_info=True)
        node = "operators that could not run on fake tensors"
    if node is not None:
        reason = (
            f"forward asks for strides, and TorchDynamo takes those of {node} for others than "
            "PyTorch's kernel gives: the function runs in eager PyTorch"
        )
        logger.warning("%s", reason)
        raise skipped_frame(reason)


def _watch_global_hooks() -> None:
    """Have Dynamo compile again once hooks of all modules are added: the graph has no calls."""
    try:
        guard_global_hooks(GLOBAL_HOOK_DICTS)
    except Exception:
        logger.debug("hooks of all modules are not watched", exc_info=True)


def tvmbridge_eager(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Called:
    """Run the graphs in eager PyTorch as :func:`tvmbridge` would capture them.

    PyTorch runs and differentiates the captured graph. Use this slow backend to find which stage
    causes a numerical difference. Arguments and exceptions are the same as for :func:`tvmbridge`.
    """
    return keep(_called(graph_module, options, mode, captured_graph))


def tvmbridge_aot(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Called:
    """Run the forward and backward that :func:`tvmbridge` would compile, operator by operator.

    PyTorch runs each operator of the Relax functions. Use this slow backend to find which stage
    causes a numerical difference. Arguments and exceptions are the same as for :func:`tvmbridge`.
    """
    return keep(_called(graph_module, options, mode, differentiated_graph))


for backend in (tvmbridge, tvmbridge_eager, tvmbridge_aot):
    backend.reset = forget  # type: ignore[attr-defined]  # which torch.compiler.reset() calls

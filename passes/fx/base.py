"""The base class of all fx passes, and functions that read, create and remove nodes of a graph.

Passes expect graphs of torch.export: operators are ATen overloads, and every node has its fake
value in ``meta["val"]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from tvmbridge.core.errors import PassError
from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.torch_private import OpOverload, enable_python_dispatcher

HELD = ("_parameters", "_buffers", "_modules")
# Kinds of nodes whose tensor exists before the graph runs.
LEAVES = ("get_attr", "placeholder")


@dataclass(frozen=True)
class FxPass(PassBase):
    """Base of all fx passes; the fields of a subclass are its options.

    ``pass_(graph_module)`` returns a ``PassResult`` and leaves ``graph_module`` unchanged. The new
    graph module has the same parameters, buffers and submodules under the same names.
    """

    def applies(self, graph_module: fx.GraphModule) -> bool:
        """Whether there may be something to rewrite; called before the graph is copied."""
        return True

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Rewrite the graph in place and record it in ``report``; subclasses implement this."""
        raise NotImplementedError

    def apply(self, graph_module: fx.GraphModule, report: PassReport) -> PassResult:
        """Rewrite a copy of ``graph_module``, and record in ``report`` what was done or declined.

        Returns:
            The rewritten copy, or ``graph_module`` itself if there was nothing to rewrite.

        Raises:
            PassError: the rewritten graph is not well-formed.
        """
        if not self.applies(graph_module):
            return PassResult(graph_module, False)
        changed, before = copied(graph_module), report.rewrites
        self.rewrite(changed, report)
        if report.rewrites == before:
            return PassResult(graph_module, False)
        try:
            changed.graph.lint()
        except Exception as error:
            raise PassError(f"{type(self).__name__} made a malformed graph: {error}") from error
        changed.recompile()
        return PassResult(changed, True)

    def abandon(self, error: BaseException) -> None:
        """Handle that this pass will not run because of an earlier ``error``; does nothing here."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Call :meth:`apply` without a report; torch.fx calls this method."""
        return self.apply(graph_module, PassReport())


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph of a graph module; the copy shares the tensors and submodules."""
    graph = copy.deepcopy(graph_module.graph)
    made = fx.GraphModule(graph_module, graph, type(graph_module).__name__)
    for held in HELD:
        # GraphModule copies only attributes that the graph reads, into new modules.
        made.__dict__[held] = dict(graph_module.__dict__[held])
    made.training = graph_module.training
    made.meta.update(graph_module.meta)
    return made


def value_of(node: Any) -> Any:
    """Return the fake value of a node, or None if it has none; return other values as they are."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Return the shape of a node's tensor; sizes may be symbols. None if it is no tensor."""
    value = value_of(node)
    return tuple(map(known, value.shape)) if isinstance(value, torch.Tensor) else None


def known(size: Any) -> Any:
    """Return a size as an int if the graph's guards allow its symbol one value, else unchanged."""
    if not isinstance(size, torch.SymInt):
        return size
    found = size.node.shape_env.replace(size.node.expr)
    return int(found) if found.is_Integer else size


def is_operator(node: fx.Node) -> bool:
    """Whether the node calls an operator overload such as ``aten.tanh.default``."""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator by their names in its schema, including defaults."""
    target: Any = node.target
    bound: dict[str, Any] = {}
    for index, argument in enumerate(target._schema.arguments):
        if index < len(node.args):
            bound[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


class Emitter:
    """Creates nodes at the end of a graph, with fake values.

    The caller sorts the graph afterwards by ``places`` (``effects.sort``): a new node gets the
    place of the last node that it reads.

    Args:
        graph: the graph that gets the nodes.
        places: the position of each existing node; new nodes are added.
        like: a node that the new ones replace: they get its stack trace and module stack.
    """

    def __init__(self, graph: fx.Graph, places: dict[fx.Node, float], like: fx.Node) -> None:
        self.graph = graph
        self.places = places
        self.made: list[fx.Node] = []
        self.end = graph.output_node()
        self.origin: dict[Any, Any] = {
            k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta
        }

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node that calls ``target``, and compute its fake value."""
        return self.valued(evaluated(target, args, kwargs), target, *args, **kwargs)

    def valued(self, value: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node that calls ``target``, with the fake value ``value``."""
        with self.graph.inserting_before(self.end):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.origin)
        node.meta["val"] = value
        self.places[node] = max((self.places[n] for n in node.all_input_nodes), default=0.0)
        self.made.append(node)
        return node

    def erase_unused(self) -> None:
        """Remove the created nodes that nothing reads."""
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)
                del self.places[node]
        self.made = [n for n in self.made if n in self.places]


def evaluated(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run ``target`` on the fake values of the nodes in ``args`` and ``kwargs``."""
    nodes: list[fx.Node] = []
    fx.map_arg((args, dict(kwargs)), nodes.append)
    given, named = fx.map_arg((args, dict(kwargs)), value_of)
    modes = [v.fake_mode for n in nodes if hasattr(v := value_of(n), "fake_mode")]
    if not modes:
        return target(*given, **named)
    with torch.no_grad(), modes[0], enable_python_dispatcher():
        return target(*given, **named)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the position of each node in the graph's order."""
    return {node: place for place, node in enumerate(graph.nodes)}


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensor; a symbolic size counts as its hint."""
    value = value_of(node)
    sizes = [s if isinstance(s, int) else s.node.hint or 1 for s in value.shape]
    return int(torch.Size(sizes).numel()) * int(value.element_size())


def erase_items(nodes: Sequence[fx.Node]) -> None:
    """Remove those of ``nodes`` that nothing reads, and splits whose items nothing reads any more.

    A split is any input of a removed node that returns a tuple or list; its items are removed too.
    """
    unread = [node for node in nodes if not node.users]
    inputs = {i: None for n in unread for i in n.all_input_nodes}
    for node in unread:
        node.graph.erase_node(node)
    for each in inputs:
        if not isinstance(value_of(each), tuple | list) or any(u.users for u in each.users):
            continue
        for item in list(each.users):
            item.graph.erase_node(item)
        each.graph.erase_node(each)

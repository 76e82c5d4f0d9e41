"""What every fx pass is made of: torch.fx's PassBase, applied to a copy of the graph, and a report.

Operators are ATen overloads, and every node has its fake value in ``meta["val"]``, as torch.export
leaves them.
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
# Nodes that name a tensor which is there before the graph runs.
LEAVES = ("get_attr", "placeholder")


@dataclass(frozen=True)
class FxPass(PassBase):
    """Base of all fx passes; the fields of a subclass are its options.

    ``pass_(graph_module)`` returns a ``PassResult``. The graph module that it gets stays as it was;
    the new one holds the same parameters, buffers and submodules under the same names.
    """

    def applies(self, graph_module: fx.GraphModule) -> bool:
        """Whether there may be something to rewrite; it is asked before the graph is copied."""
        return True

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Rewrite the graph in place; subclasses implement it."""
        raise NotImplementedError

    def apply(self, graph_module: fx.GraphModule, report: PassReport) -> PassResult:
        """The rewritten graph module; what was done and declined goes into ``report``.

        Raises:
            PassError: the graph that the pass has made is not well-formed.
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
        """Called where the pass is not run, since ``error`` came before it."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """torch.fx's entry: :meth:`apply` without a report."""
        return self.apply(graph_module, PassReport())


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A graph module with a graph of its own that shares the tensors and submodules."""
    graph = copy.deepcopy(graph_module.graph)
    made = fx.GraphModule(graph_module, graph, type(graph_module).__name__)
    for held in HELD:
        # GraphModule copies only what the graph names, into modules of its own.
        made.__dict__[held] = dict(graph_module.__dict__[held])
    made.training = graph_module.training
    made.meta.update(graph_module.meta)
    return made


def value_of(node: Any) -> Any:
    """The fake value of a node; None where it has none."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The shape of a tensor, whose sizes may be symbols; None where it is no tensor."""
    value = value_of(node)
    return tuple(map(known, value.shape)) if isinstance(value, torch.Tensor) else None


def known(size: Any) -> Any:
    """A size as a number, where the graph's guards leave a symbol only one."""
    if not isinstance(size, torch.SymInt):
        return size
    found = size.node.shape_env.replace(size.node.expr)
    return int(found) if found.is_Integer else size


def is_operator(node: fx.Node) -> bool:
    """Whether the node calls an operator, an overload such as ``aten.tanh.default``."""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by their names in its schema, with the defaults."""
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
    """Makes nodes at the end of a graph, with the fake values of what they compute.

    The graph is to be sorted afterwards (``effects.sort``) by ``places``, where a new node gets the
    place of the last node that it reads.

    Args:
        graph: where the nodes are put.
        places: of the nodes that were there before; new ones are added.
        like: the node that they take the place of: its line of the user's code is theirs.
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
        """A call of ``target``."""
        return self.valued(evaluated(target, args, kwargs), target, *args, **kwargs)

    def valued(self, value: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of ``target``, of which the fake value is known."""
        with self.graph.inserting_before(self.end):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.origin)
        node.meta["val"] = value
        self.places[node] = max((self.places[n] for n in node.all_input_nodes), default=0.0)
        self.made.append(node)
        return node

    def erase_unused(self) -> None:
        """Remove those that nothing reads."""
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)
                del self.places[node]
        self.made = [n for n in self.made if n in self.places]


def evaluated(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What ``target`` computes of the fake values of nodes."""
    nodes: list[fx.Node] = []
    fx.map_arg((args, dict(kwargs)), nodes.append)
    given, named = fx.map_arg((args, dict(kwargs)), value_of)
    modes = [v.fake_mode for n in nodes if hasattr(v := value_of(n), "fake_mode")]
    if not modes:
        return target(*given, **named)
    with torch.no_grad(), modes[0], enable_python_dispatcher():
        return target(*given, **named)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """The place of each node in the order of the program."""
    return {node: place for place, node in enumerate(graph.nodes)}


def nbytes(node: fx.Node) -> int:
    """Bytes of a tensor; symbols count as their hints."""
    value = value_of(node)
    sizes = [s if isinstance(s, int) else s.node.hint or 1 for s in value.shape]
    return int(torch.Size(sizes).numel()) * int(value.element_size())


def erase_items(nodes: Sequence[fx.Node]) -> None:
    """Remove the nodes that nothing reads, and splits and tuples of which nothing reads an item."""
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

"""A graph of TorchDynamo as a module: what the captured model holds is its own, not an argument.

Dynamo passes parameters, buffers, sizes and numbers as arguments of one function::

    forward(weight, s0, x, eps): x + eps.item() * weight.sum()   # x is (s0, 8)
 -> module.weight;  forward(x, eps): x + eps * self.weight.sum()

Compiled code reads the tensors of a module where they lie, and converts them once.
"""

from __future__ import annotations

import copy
import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from tvmbridge.core.generated import Scope
from tvmbridge.core.torch_private import captured_in
from tvmbridge.dynamo.spelling import as_python_writes

# Nothing that these nodes do is an operator.
_NO_OPERATORS = ("getitem", "size", "sym_size", "_set_grad_enabled", "item")
_numbers = itertools.count()

Given: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...] | None]


@dataclass(frozen=True)
class DynamoGraph:
    """A graph, with where each argument of it goes.

    ``module_class`` runs it. ``held`` are the places of the tensors that the captured model holds,
    ``names`` how a module of that class calls them; ``given`` are the places of the arguments of
    its forward, ``numbers`` those among them that come as tensors of one number, ``lengths`` those
    that are integers: each becomes the size of a tensor without elements, since code is for any
    size, and a number is a constant. What is in none of these, sizes of arguments, is found again.
    ``constants`` are further tensors and regions.
    ``symbolic``: sizes are not all known.
    """

    module_class: type[nn.Module]
    constants: Mapping[str, Any]
    held: tuple[int, ...]
    names: tuple[str, ...]
    given: tuple[int, ...]
    numbers: tuple[int, ...]
    lengths: tuple[int, ...]
    symbolic: bool
    operators: int

    @property
    def name(self) -> str:
        """The class of the module whose forward was captured, or the name of the function."""
        return self.module_class.__name__

    def module(self, tensors: Sequence[torch.Tensor]) -> nn.Module:
        """A module that holds ``tensors`` and runs the graph; its ``training`` says nothing."""
        module = self.module_class()
        for name, value in self.constants.items():
            _hold(module, name, value)
        for name, tensor in zip(self.names, tensors, strict=True):
            _hold(module, name, tensor)
        return module.eval()

    def held_of(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Picks from a call's arguments the tensors that the captured model holds."""
        return _picker(self.held)

    def given_with(self, tensors: Sequence[torch.Tensor]) -> Given:
        """Picks from a call's arguments those of the forward of a module that holds ``tensors``.

        It is None where the captured model holds others in the call.
        """
        scope = Scope()
        held = zip(self.held, tensors, strict=True)
        same = [f"args[{place}] is {scope.bind('t', tensor)}" for place, tensor in held]
        empty = scope.bind("tensor_of", _tensor_of)
        forms = dict.fromkeys(self.numbers, "args[{0}].item()")
        forms |= dict.fromkeys(self.lengths, f"{empty}(args[{{0}}])")
        given = [forms.get(p, "args[{0}]").format(p) for p in self.given]
        body = f"({', '.join([*given, ''])}) if {' and '.join(same) or True} else None"
        found: Given
        found = scope.function("given", f"given = lambda args: {body}", "<given>")
        return found


def _hold(module: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)


def _running(
    name: str, owner: nn.Module, graph: fx.Graph
) -> tuple[type[nn.Module], dict[str, Any]]:
    """A class of modules that run ``graph``, and what of ``owner`` these need.

    All modules of it have the same code; those that PyTorch makes of a graph have a class each.
    """
    as_python_writes(graph)
    constants: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            first = str(node.target).partition(".")[0]
            if hasattr(owner, first):
                constants[first] = _constant(first, getattr(owner, first))
    code = graph.python_code("self")
    file = f"<tvmbridge graph {next(_numbers)} of {name}>"
    forward = Scope(code.globals).function("forward", code.src, file)
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    # Operators that take a region read these two of it.
    read = {"graph": graph, "meta": getattr(owner, "meta", {})}
    return type(name, (nn.Module,), {"forward": forward, **read}), constants


def _constant(name: str, value: Any) -> Any:
    """``value``; the region of an operator that runs one as a module of a class of its own."""
    if not isinstance(value, fx.GraphModule):
        return value
    class_, constants = _running(name, value, copy.deepcopy(value.graph))
    region = class_()
    for inner, held in constants.items():
        _hold(region, inner, held)
    return region


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if not places:
        return lambda args: ()
    if len(places) == 1:
        (place,) = places
        return lambda args: (args[place],)
    return itemgetter(*places)


def read_graph(dynamo: fx.GraphModule) -> DynamoGraph:
    """Describe what Dynamo hands to a backend; ``dynamo`` is left as it is."""
    graph = copy.deepcopy(dynamo.graph)
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [_Input(place, node) for place, node in enumerate(placeholders)]
    held = [i for i in inputs if i.is_held]
    names = _names(graph, held)
    for each, name in zip(held, names, strict=True):
        _replace(graph, each.node, "get_attr", name)
    sizes = _sizes(inputs)
    for each in inputs:
        if each.symbol in sizes:
            _replace(graph, each.node, "call_method", "size", sizes[each.symbol])
        if each.is_number:
            for user in list(each.node.users):
                user.replace_all_uses_with(each.node)
                graph.erase_node(user)
    given = [i for i in inputs if not i.is_held and i.symbol not in sizes]
    lengths = [i for i in given if i.symbol is not None]
    for each in lengths:
        _read_as_size(graph, each.node)
    module_class, constants = _running(captured_in(), dynamo, graph)
    return DynamoGraph(
        module_class=module_class,
        constants=constants,
        held=tuple(i.place for i in held),
        names=names,
        given=tuple(i.place for i in given),
        numbers=tuple(i.place for i in given if i.is_number),
        lengths=tuple(i.place for i in lengths),
        symbolic=any(i.symbol is not None for i in inputs),
        operators=_count(dynamo),
    )


def _tensor_of(length: int) -> Any:
    """A tensor of this size without elements; a negative number as it is."""
    return torch.empty((length, 0)) if length >= 0 else length


def _length_of(carrier: Any) -> Any:
    """The number that :func:`_tensor_of` has made a tensor of."""
    return carrier.size(0) if isinstance(carrier, torch.Tensor) else carrier


def _read_as_size(graph: fx.Graph, node: fx.Node) -> None:
    """Have an integer argument arrive as the size of a tensor."""
    node.type = None
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        made = graph.call_function(_length_of, (node,))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _names(graph: fx.Graph, held: Sequence[_Input]) -> tuple[str, ...]:
    """Names of attributes for the tensors that the captured model holds."""
    taken = {node.target for node in graph.nodes if node.op in ("get_attr", "call_module")}
    names = []
    for each in held:
        name = each.node.name
        while name in taken or hasattr(nn.Module, name):
            name += "_"
        names.append(name)
    return tuple(names)


class _Input:
    """A placeholder of Dynamo's graph, and what Dynamo says of it."""

    def __init__(self, place: int, node: fx.Node) -> None:
        self.place, self.node = place, node
        self.example = node.meta.get("example_value")
        described = node.meta.get("tensor_dict") or {}
        is_tensor = isinstance(self.example, torch.Tensor)
        self.is_held = is_tensor and "_dynamo_static_input_type" in described
        argument = node.meta.get("grapharg")
        self.is_number = (
            is_tensor
            and argument is not None
            and not argument.is_tensor
            and all((u.op, u.target) == ("call_method", "item") for u in node.users)
        )
        self.symbol = str(self.example) if isinstance(self.example, torch.SymInt) else None


def _sizes(inputs: Sequence[_Input]) -> dict[str | None, tuple[fx.Node, int]]:
    """Which dimension of which argument each symbol is the size of."""
    found: dict[str | None, tuple[fx.Node, int]] = {}
    for each in inputs:
        if not isinstance(each.example, torch.Tensor) or each.is_held or each.is_number:
            continue
        for dimension, size in enumerate(each.example.shape):
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size), (each.node, dimension))
    return found


def _replace(
    graph: fx.Graph, node: fx.Node, op: str, target: str, args: tuple[Any, ...] = ()
) -> None:
    """Put another node, behind all placeholders, in place of a placeholder."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        made = graph.create_node(op, target, args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _count(module: fx.GraphModule) -> int:
    """How many operators a graph runs, those of regions within it too."""
    count = 0
    for node in module.graph.nodes:
        if node.op == "get_attr":
            region = getattr(module, str(node.target), None)
            count += _count(region) if isinstance(region, fx.GraphModule) else 0
        elif node.op == "call_module":
            count += 1
        elif node.op in ("call_function", "call_method"):
            name = getattr(node.target, "__name__", str(node.target))
            count += name not in _NO_OPERATORS
    return count

"""Turn a graph of TorchDynamo into a module that holds the captured model's parameters and buffers.

Dynamo passes parameters, buffers, sizes and numbers as arguments of one function::

    forward(weight, s0, x, eps): x + eps.item() * weight.sum()   # x is (s0, 8)
 -> module.weight;  forward(x, eps): x + eps * self.weight.sum()

Compiled code reads the tensors of a module in place, and converts each of them only once.
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
from tvmbridge.core.torch_private import captured_in, set_grad_enabled
from tvmbridge.dynamo.spelling import as_python_writes

# Nodes with these targets do not count as operators.
_NO_OPERATORS = ("getitem", "size", "sym_size", "_set_grad_enabled", "item")
_numbers = itertools.count()

Given: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...] | None]


@dataclass(frozen=True)
class DynamoGraph:
    """A graph as a module class, and the role of each argument that Dynamo passes.

    A *position* is an index into the arguments that Dynamo passes to the graph. The other positions
    than ``held`` and ``given`` are sizes, which forward reads from its tensor arguments.

    - ``module_class``: the class of modules that run the graph.
    - ``constants``: further tensors and subgraphs that the module needs, by attribute name.
    - ``held``: positions of the model's parameters and buffers.
    - ``names``: attribute names for the tensors at ``held``.
    - ``given``: positions of the arguments that the module's forward takes.
    - ``numbers``: positions in ``given`` whose argument is a number wrapped in a tensor.
    - ``lengths``: positions in ``given`` whose argument is an integer. The integer is passed as the
      size of an empty tensor: code can be compiled for any size, but a number is a constant.
    - ``symbolic``: whether some sizes are symbols.
    - ``symbolic_rows``: whether the first dimension of an argument is a symbol.
    - ``operators``: the number of operators.
    """

    module_class: type[nn.Module]
    constants: Mapping[str, Any]
    held: tuple[int, ...]
    names: tuple[str, ...]
    given: tuple[int, ...]
    numbers: tuple[int, ...]
    lengths: tuple[int, ...]
    symbolic: bool
    symbolic_rows: bool
    operators: int

    @property
    def name(self) -> str:
        """The class of the module whose forward was captured, or the name of the function."""
        return self.module_class.__name__

    def module(self, tensors: Sequence[torch.Tensor]) -> nn.Module:
        """Return a module, always in eval mode, that holds ``tensors`` and runs the graph."""
        module = self.module_class()
        for name, value in self.constants.items():
            _hold(module, name, value)
        for name, tensor in zip(self.names, tensors, strict=True):
            _hold(module, name, tensor)
        return module.eval()

    def held_of(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Return a function that picks parameters and buffers from a call's arguments."""
        return _picker(self.held)

    def given_with(self, tensors: Sequence[torch.Tensor]) -> Given:
        """Return a function that picks forward's arguments from a call's arguments.

        The function returns None if the call's parameters and buffers are not ``tensors``.
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
    """Return a class of modules that run ``graph``, and the attributes of ``owner`` that they need.

    All modules of the class share their code, unlike GraphModules, which have one class each.
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
    # Higher-order operators read these two attributes of a subgraph.
    read = {"graph": graph, "meta": getattr(owner, "meta", {})}
    return type(name, (nn.Module,), {"forward": forward, **read}), constants


def _constant(name: str, value: Any) -> Any:
    """Return ``value``; for the subgraph of a higher-order operator, a module that runs it."""
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
    """Read the graph that Dynamo passes to a backend; ``dynamo`` is not modified."""
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
    _restore_gradients(graph)
    module_class, constants = _running(captured_in(), dynamo, graph)
    return DynamoGraph(
        module_class=module_class,
        constants=constants,
        held=tuple(i.place for i in held),
        names=names,
        given=tuple(i.place for i in given),
        numbers=tuple(i.place for i in given if i.is_number),
        lengths=tuple(i.place for i in lengths),
        symbolic=any(i.symbol is not None or i.has_symbols for i in inputs),
        symbolic_rows=any(i.has_symbolic_rows for i in given),
        operators=_count(dynamo),
    )


def _restore_gradients(graph: fx.Graph) -> None:
    """Change the graph to restore the gradient mode of its call.

    Dynamo restores the mode of the capture, a constant. Code for calls without a gradient is
    captured and run with gradients off, where this constant would change the mode.
    """
    outside = torch.is_grad_enabled()
    switches = graph.find_nodes(op="call_function", target=set_grad_enabled)
    restoring = [node for node in switches if node.args[0] is outside]
    if not restoring:
        return
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        mode = graph.call_function(torch.is_grad_enabled)
    for node in restoring:
        node.args = (mode,)


def _tensor_of(length: int) -> Any:
    """Return a tensor of shape ``(length, 0)``; return a number that is no size as it is."""
    return torch.empty((length, 0)) if 0 <= length < 1 << 63 else length


def _length_of(carrier: Any) -> Any:
    """Return the integer that :func:`_tensor_of` has converted."""
    return carrier.size(0) if isinstance(carrier, torch.Tensor) else carrier


def _read_as_size(graph: fx.Graph, node: fx.Node) -> None:
    """Change the graph to read an integer argument from the size of an empty tensor."""
    node.type = None
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        made = graph.call_function(_length_of, (node,))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _names(graph: fx.Graph, held: Sequence[_Input]) -> tuple[str, ...]:
    """Return free attribute names for the model's parameters and buffers."""
    taken = {node.target for node in graph.nodes if node.op in ("get_attr", "call_module")}
    names = []
    for each in held:
        name = each.node.name
        while name in taken or hasattr(nn.Module, name):
            name += "_"
        names.append(name)
    return tuple(names)


class _Input:
    """A placeholder of Dynamo's graph, classified by the metadata that Dynamo gives it.

    - ``place``: its position among the arguments.
    - ``node``, ``example``: the placeholder, and its example value.
    - ``is_held``: whether it is a parameter or buffer of the model.
    - ``is_number``: whether it is a Python number that Dynamo wraps in a tensor.
    - ``has_symbols``: whether it is a tensor with symbolic sizes.
    - ``has_symbolic_rows``: whether it is a tensor whose first size is symbolic.
    - ``symbol``: the symbol, if it is an integer of symbolic value; otherwise None.
    """

    def __init__(self, place: int, node: fx.Node) -> None:
        self.place, self.node = place, node
        self.example = node.meta.get("example_value")
        described = node.meta.get("tensor_dict") or {}
        is_tensor = isinstance(self.example, torch.Tensor)
        # A hidden state with a gradient history is no buffer.
        stays = isinstance(self.example, nn.Parameter) or not (
            isinstance(self.example, torch.Tensor) and self.example.requires_grad
        )
        self.is_held = is_tensor and stays and "_dynamo_static_input_type" in described
        argument = node.meta.get("grapharg")
        self.is_number = (
            is_tensor
            and argument is not None
            and not argument.is_tensor
            and all((u.op, u.target) == ("call_method", "item") for u in node.users)
        )
        shape = self.example.shape if isinstance(self.example, torch.Tensor) else ()
        self.has_symbols = not all(type(n) is int for n in shape)
        self.has_symbolic_rows = len(shape) > 0 and type(shape[0]) is not int
        self.symbol = str(self.example) if isinstance(self.example, torch.SymInt) else None


def _sizes(inputs: Sequence[_Input]) -> dict[str | None, tuple[fx.Node, int]]:
    """Map each symbol to the tensor argument and the dimension that it is the size of."""
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
    """Replace a placeholder by a new node, which follows all placeholders."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        made = graph.create_node(op, target, args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _count(module: fx.GraphModule) -> int:
    """Return the number of operators of a graph, including its subgraphs."""
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

"""The decompositions of the calls of a program, each distinct call traced once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from tvmbridge.core.symbolic_numbers import SYMBOLIC, expression_of
from tvmbridge.core.torch_private import (
    DispatchKey,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    pytree,
    storage_key,
)
from tvmbridge.core.torch_private.decomposing import (
    WritesOperandError,
    is_preserved,
    traced_without_writes,
)

Table: TypeAlias = dict[Any, Callable[..., Any]]

aten = torch.ops.aten

# The keys whose kernels replace an operator by others, in the trace of a call.
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_REPLACED_BY = (_COMPOSITE, DispatchKey.Functionalize)
# The query of a tensor's device.
_DEVICE = torch.ops.prim.device.default
# Operators that become views by these operators alone, unless the memory has to be copied.
_VIEWS = frozenset(
    (
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    )
)


class NotByOperatorError(Exception):
    """The program must be decomposed as a whole."""


@dataclass(frozen=True)
class OperatorTrace:
    """The decomposition of one call.

    - ``graph``: its operators; the placeholders are the operands that are tensors or symbols.
    - ``views``: the nodes whose result shares memory with an operand or an earlier result.
    """

    graph: fx.Graph
    views: frozenset[fx.Node]


@dataclass
class Traces:
    """The decompositions of the calls of a program, by operator and metadata of the operands.

    Args:
        table: the decompositions that are no kernels of composite operators.
    """

    table: Table
    known: dict[Any, OperatorTrace] = field(default_factory=dict)

    def of(self, func: OpOverload, leaves: Sequence[Any], structure: Any) -> OperatorTrace:
        """Return the decomposition of a call."""
        numbers: dict[int, int] = {}
        described = [_described(leaf, numbers) for leaf in leaves]
        key = (func, structure, *described)
        try:
            found = self.known.get(key)
        except TypeError as error:
            raise NotByOperatorError(f"an argument of {func} has no hash") from error
        if found is None:
            found = self.known[key] = self._traced(func, leaves, structure)
        return found

    def _traced(self, func: OpOverload, leaves: Sequence[Any], structure: Any) -> OperatorTrace:
        operands = list({id(leaf): leaf for leaf in leaves if is_operand(leaf)}.values())
        positions = {id(operand): i for i, operand in enumerate(operands)}

        def call(*given: Any) -> Any:
            put = [given[positions[id(leaf)]] if is_operand(leaf) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(put, structure)
            return func(*args, **kwargs)

        try:
            written = int(func._schema.is_mutable)
            graph = _recorded(func, call, operands, self.table)
            if graph is None:
                graph = traced_without_writes(call, operands, self.table, written)
        except WritesOperandError as error:
            # Batch norm writes its running statistics, which its schema does not declare.
            raise NotByOperatorError(f"{func} writes into an operand") from error
        return OperatorTrace(graph, _views(graph))


class _Received(TorchDispatchMode):
    """Notes the calls that reach PyTorch's kernels: operator, arguments and result.

    A composite operator is decomposed by its kernel first, and one in ``table`` by the table.
    """

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.calls: list[tuple[Any, Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for decompose in self._decompositions(func):
            with self:
                result = decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if func is not _DEVICE:
            self.calls.append((func, args, kwargs, result))
        return result

    def _decompositions(self, func: Any) -> Iterator[Callable[..., Any]]:
        if not isinstance(func, OpOverload) or func is _DEVICE:
            return
        if func.has_kernel_for_dispatch_key(_COMPOSITE) and not is_preserved(func):
            yield func.decompose
        if func in self.table:
            yield self.table[func]


def _recorded(
    func: OpOverload, call: Callable[..., Any], operands: Sequence[Any], table: Table
) -> fx.Graph | None:
    """Return the graph of an operator that becomes views and new tensors, without a trace of it.

    PyTorch's own trace takes some milliseconds for each operator. Return None for other operators,
    and if a call computes a number from sizes.

    Args:
        operands: fake tensors, and numbers that are symbols.
    """
    if func._schema.is_mutable or not all(map(_has_known_sizes, operands)):
        return None
    with enable_python_dispatcher(), _Received(table) as received:
        result = call(*operands)
    graph, made = fx.Graph(), dict[Any, fx.Node]()
    for number, operand in enumerate(operands):
        node = graph.placeholder(f"arg{number}_1")
        made.setdefault(_identity(operand), node)
        node.meta["val"] = operand
    for target, args, kwargs, value in received.calls:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        values = [value] if _is_tensor(value) else value
        if (
            not isinstance(values, list | tuple)
            or not all(map(_is_tensor, values))
            or not all(map(_has_known_sizes, values))
        ):
            return None
        if not (target in _VIEWS or _stays(target, table)) or _ends_in_default(target, args):
            return None
        if any(is_operand(leaf) and _identity(leaf) not in made for leaf in leaves):
            return None
        here = [made[_identity(leaf)] if is_operand(leaf) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(here, structure)
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if _is_tensor(value):
            made[_identity(value)] = node
            continue
        for number, each in enumerate(values):
            made[_identity(each)] = part = graph.call_function(operator.getitem, (node, number))
            part.meta["val"] = each
    results = pytree.tree_leaves(result)
    inputs = set(map(_identity, operands))
    if any(_identity(each) not in made or _identity(each) in inputs for each in results):
        return None
    graph.output(pytree.tree_map(lambda each: made[_identity(each)], result))
    return graph


def _ends_in_default(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the last argument is the default, which PyTorch's trace leaves out."""
    last = func._schema.arguments[len(args) - 1] if args else None
    if last is None or _is_tensor(args[-1]) or not last.has_default_value():
        return False
    return bool(args[-1] == last.default_value)


def _stays(func: Any, table: Table) -> bool:
    """Whether an operator decomposes into itself, and returns new tensors."""
    if not isinstance(func, OpOverload):
        return False
    schema = func._schema
    if "batch_norm" in schema.name:  # it writes statistics, which its schema need not declare
        return False
    if func in table or any(a.alias_info for a in (*schema.arguments, *schema.returns)):
        return False
    replaced = [key for key in _REPLACED_BY if func.has_kernel_for_dispatch_key(key)]
    return not replaced or (replaced == [_COMPOSITE] and is_preserved(func))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _identity(leaf: Any) -> Any:
    """Return what tells operands of a call apart: the tensor, or the expression of a number."""
    return leaf.node.expr if isinstance(leaf, SYMBOLIC) else id(leaf)


def _has_known_sizes(leaf: Any) -> bool:
    """Whether no size of a tensor, or no number, depends on data."""
    numbers = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
    return all(type(n) is int or is_known_number(n) for n in numbers)


def is_operand(leaf: Any) -> bool:
    """Whether an argument of an operator is a placeholder of its trace."""
    return isinstance(leaf, (torch.Tensor, *SYMBOLIC))


def _described(leaf: Any, numbers: dict[int, int]) -> Any:
    """Return what a decomposition may depend on; ``numbers`` counts the distinct operands."""
    if not is_operand(leaf):
        return type(leaf), leaf, repr(leaf) if isinstance(leaf, float | complex) else None
    number = numbers.setdefault(id(leaf), len(numbers))
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.node.expr, number
    sizes = tuple(map(expression_of, (*leaf.shape, *leaf.stride(), leaf.storage_offset())))
    where = (leaf.device, number, leaf.requires_grad, isinstance(leaf, torch.nn.Parameter))
    return (sizes, leaf.dtype, *where)


def _views(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes whose result shares memory with the value of a node before, or is unknown.

    Raises:
        NotByOperatorError: a node is no operator, or a result is not a plain tensor.
    """
    seen: set[int] = set()
    views = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        if node.op not in ("placeholder", "call_function"):
            raise NotByOperatorError(f"a decomposition has {node.op} {node.target}")
        if is_known_number(value):
            continue
        if not isinstance(node.target, OpOverload | str) and node.target is not operator.getitem:
            raise NotByOperatorError(f"a decomposition calls {node.target}")
        if not all(map(is_plain, pytree.tree_leaves(value))):
            raise NotByOperatorError(f"a result of {node.target} is not a plain tensor")
        storages = {storage_key(v) for v in pytree.tree_leaves(value) if v is not None}
        if "val" not in node.meta or not storages.isdisjoint(seen):
            views.add(node)
        seen |= storages
    return frozenset(views)


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a fake tensor that its metadata describes, or None."""
    return value is None or (
        type(value) in (FakeTensor, torch.nn.Parameter)
        and isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and all(type(n) is int or is_known_number(n) for n in (*value.shape, *value.stride()))
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )


def is_known_number(value: Any) -> bool:
    """Whether ``value`` is an expression of the sizes of inputs, and so does not depend on data."""
    return isinstance(value, SYMBOLIC) and value.node.hint is not None

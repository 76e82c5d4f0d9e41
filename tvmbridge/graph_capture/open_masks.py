"""Remove constant attention masks that are needless: open everywhere, or exactly causal.

Model libraries that pass no mask in an eager call build a full one while they are traced, either
open everywhere or causal. PyTorch's kernels are faster without a mask, and the fastest GPU kernels
accept none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.core.decisions import simplifies
from tvmbridge.core.reached import reached
from tvmbridge.core.symbolic_numbers import hint_of, is_number
from tvmbridge.graph_capture.constant_nodes import (
    MOST_ELEMENTS,
    is_repeatable,
    run_on_cpu,
)
from tvmbridge.graph_capture.trace.fused_attention import fused_kernel
from tvmbridge.passes.fx.base import bound_arguments, evaluated

_FUSED = f"{NAMESPACE}.fused_attention.default"
_BACKWARD = f"{NAMESPACE}.fused_attention_backward.default"
_DETACH = "aten.detach.default"
# The position of the kernel's name, and the number of arguments that backward has before the query.
_KERNEL, _BACKWARD_SHIFT = 4, 5
# For each operator, the positions of its arguments for the mask and for ``is_causal``.
_PLACES = {
    "aten.scaled_dot_product_attention.default": (3, 5),
    f"{NAMESPACE}.attention.default": (3, 4),
    _FUSED: (3, 6),
}
# Operators on each element alone that PyTorch has no tag for.
_ELEMENTWISE = {"to", "_to_copy", "__and__", "__or__", "__xor__", "where"}
# Views that never copy.
_VIEWS = {
    *("expand", "unsqueeze", "squeeze", "slice", "select"),
    *("transpose", "permute", "alias", "detach", "view"),
}


# Returns the value of a number, which may be symbolic.
_Numbers: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class OpenMask:
    """A constant mask that was removed from a graph.

    - ``node``: the node that computes the mask, in a graph of its own. Its placeholders are sizes.
    - ``is_causal``: whether the mask is causal; otherwise it is open everywhere.
    """

    node: fx.Node
    is_causal: bool

    def holds(self, numbers: _Numbers) -> bool:
        """Whether the mask is causal, or open, where ``numbers`` are the values of sizes."""
        value = _constant(self.node, {}, numbers)
        return value is not None and (_is_causal if self.is_causal else _is_open)(value)


def drop_open_masks(graph: fx.Graph) -> tuple[OpenMask, ...]:
    """Remove constant masks from attention in ``graph`` that are open everywhere or causal.

    A causal mask is replaced by ``is_causal=True``. In a joint graph, forward and backward are
    changed alike. Symbolic sizes have the values of the sample.

    Returns:
        The masks that were removed.
    """
    known: dict[fx.Node, Any] = {}
    dropped: list[OpenMask] = []
    for node in graph.nodes:
        if node.op != "call_function" or str(node.target) not in _PLACES:
            continue
        mask_place, causal_place = _PLACES[str(node.target)]
        mask = _argument(node, mask_place)
        if not isinstance(mask, fx.Node) or _argument(node, causal_place):
            continue
        if not _is_constant(mask):
            continue
        if str(node.target) == _FUSED and not all(isinstance(n, int) for n in _shape(mask)):
            continue
        value = _constant(mask, known, hint_of)
        causal = simplifies(value is not None and _is_causal(value))
        if not causal and not simplifies(value is not None and _is_open(value)):
            continue
        kernel = _kernel_without_mask(node, causal) if str(node.target) == _FUSED else None
        backward = _backward_of(node) if str(node.target) == _FUSED else []
        if kernel == "" or backward is None:
            continue
        dropped.append(OpenMask(_alone(mask), causal))
        _set(node, mask_place, None)
        if causal:
            _set(node, causal_place, True)
        if kernel is not None:
            _change_kernel(node, kernel)
        for other in backward:
            for place in (mask_place, _KERNEL, causal_place):
                other.update_arg(place + _BACKWARD_SHIFT, node.args[place])
    return tuple(dropped)


def _alone(node: fx.Node) -> fx.Node:
    """Return a copy of a constant node in a graph of its own."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for current in _computed(node):
        if is_number(current):
            copies[current] = graph.placeholder(current.name)
            copies[current].meta = dict(current.meta)
        else:
            copies[current] = graph.node_copy(current, copies.__getitem__)
    return copies[node]


def _shape(node: fx.Node) -> Sequence[Any]:
    shape: Sequence[Any] = node.meta["val"].shape
    return shape


def _backward_of(node: fx.Node) -> list[fx.Node] | None:
    """Return the backward nodes of a fused attention node in a joint graph.

    Return None if one of its backward nodes reads other operands or computes a gradient of the
    mask, so that the mask must stay.
    """
    pending, found = list(node.users), dict[fx.Node, None]()
    while pending:
        user = pending.pop()
        name = str(user.target)
        if name == _DETACH or user.target is operator.getitem:
            pending.extend(user.users)
        elif name == _BACKWARD and [_undetached(v) for v in user.args[5:9]] == [
            _undetached(v) for v in node.args[:4]
        ]:
            found[user] = None
        elif name.startswith(f"{NAMESPACE}.fused_attention_backward") and (
            _origin(user.args[1]) is node
        ):
            return None
    return list(found)


def _origin(value: Any) -> Any:
    """Return the node that computes ``value``, through getitem and detach."""
    value = _undetached(value)
    while isinstance(value, fx.Node) and value.target is operator.getitem:
        value = _undetached(value.args[0])
    return value


def _undetached(value: Any) -> Any:
    """Return ``value`` without detach nodes: some versions of PyTorch detach saved tensors."""
    while isinstance(value, fx.Node) and str(value.target) == _DETACH:
        value = value.args[0]
    return value


def _kernel_without_mask(node: fx.Node, causal: bool) -> str:
    """Return the kernel that PyTorch has on this GPU for the attention without a mask, or ""."""
    given = bound_arguments(node)
    inside = [given[name].meta["val"].transpose(1, 2) for name in ("query", "key", "value")]
    # The operator is used only for attention with a gradient, and the choice depends on that.
    tensors = [t.detach().requires_grad_() for t in inside]
    query, key, value = tensors
    return fused_kernel(query, key, value, None, given["dropout_p"], causal)


def _change_kernel(node: fx.Node, kernel: str) -> None:
    """Let ``kernel`` compute a node, and update the shapes of its results."""
    _set(node, _KERNEL, kernel)
    node.meta["val"] = evaluated(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    for item in node.users:
        item.meta["val"] = node.meta["val"][item.args[1]]


def _argument(node: fx.Node, place: int) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(_name(node, place))


def _set(node: fx.Node, place: int, value: Any) -> None:
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(_name(node, place), value)


def _name(node: fx.Node, place: int) -> str:
    name: str = node.target._schema.arguments[place].name  # type: ignore[union-attr]
    return name


def _is_constant(node: fx.Node) -> bool:
    """Whether a node depends on no input but on sizes."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if is_number(current):
            continue
        if not is_repeatable(current):
            return False
        pending += (n for n in current.all_input_nodes if n not in seen)
        seen.update(current.all_input_nodes)
    return True


def _computed(node: fx.Node) -> list[fx.Node]:
    """Return a constant node and what it is computed from, beginning with sizes, inputs first."""
    return sorted(reached([node], lambda n: () if is_number(n) else n.all_input_nodes))


def _constant(node: fx.Node, known: dict[fx.Node, Any], numbers: _Numbers) -> torch.Tensor | None:
    """Return the value of a constant node; None if it is too large."""
    for current in _computed(node):
        if current in known:
            continue
        if is_number(current):
            known[current] = numbers(current.meta["val"])
        else:
            known[current] = _run(current, known, numbers)
    value: torch.Tensor | None = known[node]
    return value


def _run(node: fx.Node, known: Mapping[fx.Node, Any], numbers: _Numbers) -> torch.Tensor | None:
    """Return the value of a node, as a view of the part that it repeats.

    A mask for each row of a batch is computed once where it is the same for all rows.
    """
    values = {n: known[n] for n in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    target, shape = node.target, [numbers(n) for n in _shape(node)]
    name = str(target).removeprefix("aten.").partition(".")[0]
    alone = torch.Tag.pointwise in target.tags or name in _ELEMENTWISE  # type: ignore[union-attr]
    tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
    computed = shape
    if alone and tensors:
        given = {n: _unrepeated(v, v.dim()) for n, v in tensors.items()}
        values |= given
        computed = list(torch.broadcast_shapes(*(v.shape for v in given.values())))
    elif name in _VIEWS:
        computed = []
    if math.prod(computed) > MOST_ELEMENTS:
        return None
    try:
        value = run_on_cpu(node, values)
    except RuntimeError:  # A view of a repeated part may be impossible.
        return None
    if value is None or alone or name in _VIEWS:
        return None if value is None else value.expand(shape)
    for place, size in enumerate(value.shape):
        first = value.narrow(place, 0, min(1, size))
        if bool((value == first).all()):
            value = first.expand(value.shape)
    return value


def _unrepeated(mask: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return ``mask`` without the repetitions that a view makes along its first dimensions."""
    for place in range(dimensions):
        if not mask.stride(place):
            mask = mask.narrow(place, 0, min(1, mask.shape[place]))
    return mask


def _is_open(mask: torch.Tensor) -> bool:
    mask = _unrepeated(mask, mask.dim())
    return bool(mask.all()) if mask.dtype is torch.bool else not bool(mask.any())


def _is_causal(mask: torch.Tensor) -> bool:
    """Whether the mask is square, and row ``i`` is open for columns 0 to ``i`` alone."""
    rows, columns = mask.shape[-2:]
    if rows != columns:
        return False
    mask = _unrepeated(mask, mask.dim() - 2)
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is torch.bool:
        return bool((mask == causal).all())
    bias = torch.zeros(rows, columns, dtype=mask.dtype, device=mask.device)
    return bool((mask == bias.masked_fill(~causal, float("-inf"))).all())

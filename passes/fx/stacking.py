"""Rules that replace N equal operators by one, on tensors with one more dimension, of extent N.

A *family* is a :class:`ParallelSlices`: N nodes, its *members*, and the node that computes all of
them. A rule gets each argument of the N operators as :class:`Members`, as :class:`Each`, or as a
value that they share. It emits one operator, and returns it with its dimension of extent N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from tvmbridge.passes.fx.base import Emitter, known, shape_of, value_of

aten = torch.ops.aten


class NotStackedError(Exception):
    """N equal operators cannot become one; the text says why."""


@dataclass(frozen=True)
class ParallelSlices:
    """N nodes that are computed as one: ``nodes`` are the slices of ``value`` along ``dim``."""

    nodes: tuple[fx.Node, ...]
    value: fx.Node
    dim: int

    @property
    def rank(self) -> int:
        """The number of dimensions of one member."""
        return len(shape_of(self.nodes[0]) or ())


@dataclass(frozen=True)
class Members:
    """An argument of N equal operators: operator ``i`` reads member ``i`` of a family."""

    family: ParallelSlices


@dataclass(frozen=True)
class Each:
    """An argument of N equal operators: operator ``i`` reads ``nodes[i]``, a weight of its own."""

    nodes: tuple[fx.Node, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors; a symbolic size counts as 1."""
        value = value_of(self.nodes[0])
        sizes = [s if isinstance(s, int) else 1 for s in value.shape]
        return int(torch.Size(sizes).numel()) * value.element_size() * len(self.nodes)


Rule = Callable[[Any, Mapping[str, Any], Emitter], tuple[fx.Node, int]]


def stacked_weights(each: Each, right: int, emit: Emitter) -> fx.Node:
    """Emit the weights as one tensor that broadcasts with a stacked operand.

    The operand has ``right`` dimensions after the one that counts the operators.
    """
    shape = shape_of(each.nodes[0]) or ()
    if len(shape) >= right:
        return emit(aten.stack.default, list(each.nodes), len(shape) - right)
    stack = emit(aten.stack.default, list(each.nodes))
    if not all(isinstance(s, int) for s in shape):
        raise NotStackedError("the size of an operand is not known")
    return emit(aten.view.default, stack, [len(each.nodes), *[1] * (right - len(shape)), *shape])


def with_dim(family: ParallelSlices, dim: int, emit: Emitter) -> fx.Node:
    """Return the family's value, with the dimension that counts the members moved to ``dim``."""
    if family.dim == dim:
        return family.value
    return emit(aten.movedim.int, family.value, family.dim, dim)


def pointwise(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit an elementwise operator on stacked operands, which broadcast against each other."""
    families = [v.family for v in given.values() if isinstance(v, Members)]
    first = max(families, key=lambda f: f.rank)
    rank, dim = first.rank, first.dim
    dtypes = {value_of(n).dtype for n in _tensors(given)}
    if len(dtypes) > 1:
        raise NotStackedError(f"{target} promotes dtypes")
    ready = {name: _operand(value, rank, dim, rank - dim, emit) for name, value in given.items()}
    return emit(target, *ready.values()) if _positional(target) else _called(
        target, ready, emit
    ), dim


def _operand(value: Any, rank: int, dim: int, right: int, emit: Emitter) -> Any:
    if isinstance(value, Members):
        if value.family.rank != rank:
            raise NotStackedError("members of unequal rank are broadcast")
        return with_dim(value.family, dim, emit)
    if isinstance(value, Each):
        if len(shape_of(value.nodes[0]) or ()) > rank:
            raise NotStackedError("an operand has more dimensions than the members")
        return stacked_weights(value, right, emit)
    if isinstance(value, fx.Node):
        own = len(shape_of(value) or ())
        if own > rank:
            raise NotStackedError("an operand has more dimensions than the members")
        return emit(aten.unsqueeze.default, value, own - right) if own > right else value
    return value


def _positional(target: Any) -> bool:
    return not any(a.kwarg_only for a in target._schema.arguments)


def _called(target: Any, ready: Mapping[str, Any], emit: Emitter) -> fx.Node:
    names = [a.name for a in target._schema.arguments if not a.kwarg_only]
    keywords = {k: v for k, v in ready.items() if k not in names}
    return emit(target, *(ready[n] for n in names if n in ready), **keywords)


def _tensors(given: Mapping[str, Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for value in given.values():
        if isinstance(value, Members):
            found.append(value.family.nodes[0])
        elif isinstance(value, Each):
            found.extend(value.nodes)
        elif isinstance(value, fx.Node):
            found.append(value)
    return found


def same_for_all(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit an elementwise operator of one tensor, with the arguments of the single operators."""
    family = given[next(iter(given))].family
    rest = list(given.values())[1:]
    if any(isinstance(v, Members | Each | fx.Node) for v in rest):
        raise NotStackedError(f"{target} has further tensors")
    return emit(target, family.value, *rest), family.dim


def softmax(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit one softmax along a dimension of the members."""
    family = given["self"].family
    dim = int(given["dim"]) % family.rank
    return emit(target, family.value, dim + (dim >= family.dim), given["dtype"]), family.dim


def cumulative(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit one running sum along a dimension of the members."""
    family = given["self"].family
    dim = int(given["dim"]) % family.rank
    value = emit(target, family.value, dim + (dim >= family.dim), dtype=given["dtype"])
    return value, family.dim


def _normalized(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[ParallelSlices, int]:
    family, count = given["input"].family, len(given["normalized_shape"])
    if family.dim > family.rank - count:
        raise NotStackedError("the slices are cut within the normalized dimensions")
    return family, family.rank - family.dim


def layer_norm(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit one layer norm of all members; multiply and add stacked weights and biases after it."""
    family, right = _normalized(target, given, emit)
    weight, bias = given["weight"], given["bias"]
    shape, eps = given["normalized_shape"], given["eps"]
    if not isinstance(weight, Each) and not isinstance(bias, Each):
        return emit(target, family.value, shape, weight, bias, eps), family.dim
    value = emit(target, family.value, shape, None, None, eps)
    return _affine(value, weight, bias, right, emit), family.dim


def _affine(value: fx.Node, weight: Any, bias: Any, right: int, emit: Emitter) -> fx.Node:
    weight, bias = (
        stacked_weights(w, right, emit) if isinstance(w, Each) else w for w in (weight, bias)
    )
    if weight is None:
        return emit(aten.add.Tensor, value, bias)
    if bias is None:
        return emit(aten.mul.Tensor, value, weight)
    return emit(aten.addcmul.default, bias, value, weight)


def rms_norm(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit one RMS norm of all members; multiply by stacked weights after it."""
    family, right = _normalized(target, given, emit)
    weight, shape, eps = given["weight"], given["normalized_shape"], given["eps"]
    if not isinstance(weight, Each):
        return emit(target, family.value, shape, weight, eps), family.dim
    value = emit(target, family.value, shape, None, eps)
    return _affine(value, weight, None, right, emit), family.dim


def linear(target: Any, given: Mapping[str, Any], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit one matrix product for N linear layers; a batched one if each has its own weight."""
    family, weight, bias = given["input"].family, given["weight"], given["bias"]
    if family.dim >= family.rank:
        raise NotStackedError("the slices are cut within the features of a product")
    if not isinstance(weight, Each):
        if isinstance(bias, Each):
            raise NotStackedError("products with one weight have several biases")
        return emit(target, family.value, weight, bias), family.dim
    if family.rank != 2:
        raise NotStackedError(
            f"batched products are made of matrices, not of {family.rank} dimensions"
        )
    rows = with_dim(family, 0, emit)
    weights = emit(aten.transpose.int, emit(aten.stack.default, list(weight.nodes)), 1, 2)
    if bias is None:
        return emit(aten.bmm.default, rows, weights), 0
    if isinstance(bias, Each):
        bias = emit(aten.unsqueeze.default, emit(aten.stack.default, list(bias.nodes)), 1)
    return emit(aten.baddbmm.default, bias, rows, weights), 0


RULES: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.layer_norm.default: layer_norm,
        aten.rms_norm.default: rms_norm,
        aten.linear.default: linear,
        aten.softmax.int: softmax,
        aten.cumsum.default: cumulative,
        aten.log_softmax.int: softmax,
        aten.hardswish.default: same_for_all,
        aten.hardsigmoid.default: same_for_all,
        aten.log_sigmoid.default: same_for_all,
    }
)


def rule_for(target: Any) -> Rule | None:
    """Return the rule that stacks an operator; None if there is none."""
    if target in RULES:
        return RULES[target]
    tags, schema = target.tags, target._schema
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return None
    one = len(schema.returns) == 1 and not schema.is_mutable
    return pointwise if one and not any(a.is_out for a in schema.arguments) else None


def equal_shapes(nodes: Sequence[fx.Node]) -> bool:
    """Whether the tensors have the same shape, dtype and device."""
    values = [value_of(n) for n in nodes]
    if not all(isinstance(v, torch.Tensor) for v in values):
        return False
    first = values[0]
    return all(
        v.dtype is first.dtype and v.device == first.device and _same(v.shape, first.shape)
        for v in values[1:]
    )


def _same(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal; symbols compare by expression, which adds no guard."""
    return len(shape) == len(other) and all(
        size_key(a) == size_key(b) for a, b in zip(shape, other, strict=True)
    )


def size_key(size: Any) -> Any:
    size = known(size)
    return size.node.expr if isinstance(size, torch.SymInt) else size

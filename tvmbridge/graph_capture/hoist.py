"""Hoist the random draws of a flat traced graph: they become its inputs.

``x.bernoulli_(p)`` becomes ``x.copy_(draw)`` and ``rand([2])`` becomes ``draw``, where ``draw`` is
a new placeholder. PyTorch makes the draw before each call, with the same operator and in the same
order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import FakeTensorMode, OpOverload, pytree
from tvmbridge.core.types import NoiseDescriptor, TensorSpec
from tvmbridge.graph_capture.noise import (
    METADATA_ONLY_OVERLOADS,
    OTHER_DRAWS,
    READS_METADATA_ONLY,
    RRELU_NAME,
    base_name,
    dropout_descriptor,
    mask_descriptor,
    spec_of_node,
)

aten = torch.ops.aten

_IN_PLACE = frozenset(f"{name}_" for name in READS_METADATA_ONLY) | {"aten::normal_"}


def hoist_draws(
    graph: fx.Graph,
    mode: FakeTensorMode,
    captured: Sequence[NoiseDescriptor] = (),
    in_forward: int | None = None,
    prefix: str = "noise_",
) -> tuple[NoiseDescriptor, ...]:
    """Replace every random draw of ``graph`` by a placeholder after the existing ones.

    Args:
        graph: the recorded operators, including in-place ones.
        captured: the draws of the captured graph. If one of them reads computed values, ``graph``
            must make the same draws, and takes their descriptors.
        in_forward: the number of draws that forward makes; None: all draws of ``graph``.

    Returns:
        The descriptors of the draws in program order, which is the order of the placeholders.

    Raises:
        UnsupportedOperatorError: a draw reads computed values and is not a draw of the captured
            graph, the draws differ from the captured graph's, or backward draws.
    """
    found: list[NoiseDescriptor] = []
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    draws = [n for n in graph.nodes if _is_draw(n)]
    if in_forward is not None and len(draws) != in_forward:
        raise UnsupportedOperatorError(
            f"backward draws random numbers ({len(draws) - in_forward}), which compiled code would "
            "draw in forward already"
        )
    by_head = any(descriptor.computed for descriptor in captured)
    if by_head and len(draws) != len(captured):
        raise UnsupportedOperatorError(OTHER_DRAWS)
    for number, node in enumerate(draws):
        name = f"{prefix}{number}"
        if by_head:
            descriptor = _as_captured(node, name, captured[number])
        else:
            descriptor = _describe(node, name)
        with graph.inserting_after(last):
            last = graph.placeholder(descriptor.name)
        last.meta["val"] = _fake(descriptor.spec, mode)
        with graph.inserting_before(node):
            _replace(graph, node, last)
        graph.erase_node(node)
        found.append(descriptor)
    graph.lint()
    return tuple(found)


def _is_draw(node: fx.Node) -> bool:
    return is_random(node.target, node.args, node.kwargs)


def is_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``op`` draws random numbers; dropout with a probability of 0 does not."""
    if not isinstance(op, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    if op is aten.native_dropout.default:
        return args[2] is not False
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if base_name(op) in (RRELU_NAME, "aten::rrelu"):
        return bool(given.get("training", False))
    if "dropout_p" not in names:
        return True
    return bool(given.get("dropout_p", 0.0))


def _as_captured(node: fx.Node, name: str, captured: NoiseDescriptor) -> NoiseDescriptor:
    """Return the descriptor of the draw ``node``, named ``name``.

    A draw that reads computed values takes the descriptor ``captured``.

    Raises:
        UnsupportedOperatorError: the captured graph makes another draw here.
    """
    if not captured.computed:
        own = _describe(node, name)
        same = (own.spec.shape, own.spec.dtype) == (captured.spec.shape, captured.spec.dtype)
    else:
        value = _drawn_at(node).meta["val"]
        spec = captured.spec
        same = base_name(node.target) == base_name(captured.op)
        same = same and (tuple(value.shape), value.dtype) == (spec.shape, spec.dtype)
        own = captured
    if not same:
        raise UnsupportedOperatorError(OTHER_DRAWS)
    return replace(own, name=name)


def _drawn_at(node: fx.Node) -> fx.Node:
    """Return the node of the drawn tensor: the result, or the argument that ``rrelu`` fills."""
    drawn = node.args[1] if base_name(node.target) == RRELU_NAME else node
    assert isinstance(drawn, fx.Node)
    return drawn


def _describe(node: fx.Node, name: str) -> NoiseDescriptor:
    op: Any = node.target
    value = node.meta["val"]
    if op is aten.native_dropout.default:
        x, p = node.args[:2]
        return dropout_descriptor(name, x.meta["val"], float(p))  # type: ignore[arg-type,union-attr]
    if op is aten.bernoulli_.float:
        keep = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        return _mask(name, value, keep)
    draws = READS_METADATA_ONLY | _IN_PLACE
    if op._schema.name not in draws and op not in METADATA_ONLY_OVERLOADS:
        raise UnsupportedOperatorError(
            f"{op} draws random numbers from values that the captured graph does not compute, so "
            "the draw cannot be made beforehand"
        )
    args, kwargs = pytree.tree_map(spec_of_node, (node.args, dict(node.kwargs)))
    return NoiseDescriptor(name, TensorSpec.of(value), op, tuple(args), kwargs)


def _mask(name: str, like: torch.Tensor, keep: Any) -> NoiseDescriptor:
    return mask_descriptor(name, like, keep, drop_probability=1.0 - keep)


def _fake(spec: TensorSpec, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return spec.empty()


def _replace(graph: fx.Graph, node: fx.Node, draw: fx.Node) -> None:
    """Let the users of ``node`` read values computed from ``draw``, which nothing may mutate.

    The new nodes get the metadata of ``node``, because later draws may read its shape.
    """
    target: Any = node.target
    if target is aten.native_dropout.default:
        x, p = node.args[:2]
        factor = 0.0 if p == 1 else 1.0 / (1.0 - float(p))  # type: ignore[arg-type]
        mask = graph.call_function(aten.to.dtype, (draw, x.meta["val"].dtype))  # type: ignore[union-attr]
        scaled = graph.call_function(aten.mul.Scalar, (mask, factor))
        kept = graph.call_function(aten.mul.Tensor, (x, scaled))
        for user in list(node.users):
            assert user.target is operator.getitem
            if user.args[1] == 0:
                kept.meta = dict(user.meta)
            user.replace_all_uses_with((kept, draw)[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    elif base_name(target) == RRELU_NAME:
        x, slopes = node.args[:2]
        graph.call_function(aten.copy_.default, (slopes, draw))
        product = graph.call_function(aten.mul.Tensor, (x, draw))
        if target._schema.name.endswith("_"):
            product = graph.call_function(aten.copy_.default, (x, product))
        _stand_for(node, product)
    elif target._schema.is_mutable:
        _stand_for(node, graph.call_function(aten.copy_.default, (node.args[0], draw)))
    else:
        _stand_for(node, graph.call_function(aten.clone.default, (draw,)))


def _stand_for(node: fx.Node, other: fx.Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)

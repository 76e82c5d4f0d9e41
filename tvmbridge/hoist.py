"""Hoisting: the random draws of a flat, traced graph become its inputs.

``x.bernoulli_(p)`` becomes ``x.copy_(draw)`` and ``rand([2])`` becomes ``draw``, where ``draw`` is
a new placeholder. PyTorch fills it before each call, with the same operator and in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.noise import METADATA_ONLY_OVERLOADS, READS_METADATA_ONLY, mask_descriptor
from tvmbridge.types import NoiseDescriptor, TensorSpec

aten = torch.ops.aten

_IN_PLACE = frozenset(f"{name}_" for name in READS_METADATA_ONLY) | {"aten::normal_"}


def hoist_draws(graph: fx.Graph, mode: FakeTensorMode) -> tuple[NoiseDescriptor, ...]:
    """Replace every draw of ``graph`` by a placeholder behind the others.

    Returns:
        The draws in program order; the new placeholders stand in the same order.

    Raises:
        UnsupportedOperatorError: a draw depends on values that the graph computes.
    """
    found: list[NoiseDescriptor] = []
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for node in [n for n in graph.nodes if _is_draw(n)]:
        descriptor = _describe(node, f"noise_{len(found)}")
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
    """Whether a call of ``op`` draws random numbers: not one whose only draw is dropout of 0."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    if op is aten.native_dropout.default:
        return args[2] is not False
    names = [a.name for a in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return bool(given.get("dropout_p", 0.0))


def _describe(node: fx.Node, name: str) -> NoiseDescriptor:
    op: Any = node.target
    value = node.meta["val"]
    if op is aten.native_dropout.default:
        x, p = node.args[:2]
        return _mask(name, x.meta["val"], 1.0 - float(p))  # type: ignore[arg-type,union-attr]
    if op is aten.bernoulli_.float:
        keep = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        return _mask(name, value, keep)
    draws = READS_METADATA_ONLY | _IN_PLACE
    if op._schema.name not in draws and op not in METADATA_ONLY_OVERLOADS:
        raise UnsupportedOperatorError(
            f"{op} draws random numbers from values that the graph computes, so the draw cannot "
            "be made beforehand"
        )
    args, kwargs = pytree.tree_map(_spec_of_node, (node.args, dict(node.kwargs)))
    return NoiseDescriptor(name, TensorSpec.of(value), op, tuple(args), kwargs)


def _mask(name: str, like: torch.Tensor, keep: Any) -> NoiseDescriptor:
    return mask_descriptor(name, like, keep, drop_probability=1.0 - keep)


def _spec_of_node(value: Any) -> Any:
    return TensorSpec.of(value.meta["val"]) if isinstance(value, fx.Node) else value


def _fake(spec: TensorSpec, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


def _replace(graph: fx.Graph, node: fx.Node, draw: fx.Node) -> None:
    """Let what reads ``node`` read ``draw``, which nothing may write into."""
    target: Any = node.target
    if target is aten.native_dropout.default:
        x, p = node.args[:2]
        factor = 0.0 if p == 1 else 1.0 / (1.0 - float(p))  # type: ignore[arg-type]
        mask = graph.call_function(aten.to.dtype, (draw, x.meta["val"].dtype))  # type: ignore[union-attr]
        scaled = graph.call_function(aten.mul.Scalar, (mask, factor))
        kept = graph.call_function(aten.mul.Tensor, (x, scaled))
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with((kept, draw)[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    elif target._schema.is_mutable:
        copy = graph.call_function(aten.copy_.default, (node.args[0], draw))
        node.replace_all_uses_with(copy)
    else:
        node.replace_all_uses_with(graph.call_function(aten.clone.default, (draw,)))

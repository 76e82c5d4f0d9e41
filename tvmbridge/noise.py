"""Noise: random draws are found in the captured graph and made by PyTorch, in program order.

The compiled function stays pure: each draw is one more input of it. PyTorch's own generator makes
them in the order in which the module would, so the same seed gives the same numbers and leaves the
generator in the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.types import NoiseDescriptor, TensorSpec

aten = torch.ops.aten

_DROPOUT = (aten.dropout.default, aten.native_dropout.default)
_ATTENTION = (
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
)

# Draws that read nothing of their tensor arguments but shape, strides, dtype and device.
READS_METADATA_ONLY = frozenset(
    {
        "aten::rand",
        "aten::rand_like",
        "aten::randn",
        "aten::randn_like",
        "aten::randint",
        "aten::randint_like",
        "aten::randperm",
        "aten::uniform",
        "aten::normal_functional",
        "aten::exponential",
        "aten::geometric",
        "aten::log_normal",
        "aten::cauchy",
        "aten::random",
    }
)
METADATA_ONLY_OVERLOADS = frozenset({aten.bernoulli.p, aten.normal.float_float})

# What PyTorch makes of draws in place. They are drawn in place again: the order of the numbers
# follows the memory of the tensor that is filled, and a copy would be laid out otherwise.
_IN_PLACE: dict[Any, Any] = {
    aten.uniform.default: aten.uniform_.default,
    aten.normal_functional.default: aten.normal_.default,
    aten.exponential.default: aten.exponential_.default,
    aten.geometric.default: aten.geometric_.default,
    aten.log_normal.default: aten.log_normal_.default,
    aten.cauchy.default: aten.cauchy_.default,
    aten.random.default: aten.random_.default,
    getattr(aten.random, "from"): getattr(aten.random_, "from"),
    aten.random.to: aten.random_.to,
}


def find_noise(graph: fx.Graph) -> tuple[NoiseDescriptor, ...]:
    """Every random draw of ``graph`` in program order.

    Raises:
        UnsupportedOperatorError: a draw depends on values that the graph computes, so that
            PyTorch cannot make it beforehand.
    """
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _DROPOUT:
            if is_active_dropout(node):
                found.append(_describe_dropout(node))
        elif _is_random(node):
            found.append(_describe_draw(node))
    return tuple(found)


def dropout_arguments(node: fx.Node) -> tuple[fx.Node, float, bool]:
    """``(input, p, train)`` of a dropout node."""
    x, p, train = node.args
    assert isinstance(x, fx.Node)
    return x, float(p), train is None or bool(train)  # type: ignore[arg-type]


def is_active_dropout(node: fx.Node) -> bool:
    """Whether eager PyTorch draws a mask here: not for p of 0 or 1, nor outside training."""
    if node.target not in _DROPOUT:
        return False
    x, p, train = dropout_arguments(node)
    return train and 0.0 < p < 1.0 and x.meta["val"].numel() > 0


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target in _ATTENTION:
        return bool(_argument(node, "dropout_p", 4, 0.0))
    return torch.Tag.nondeterministic_seeded in target.tags


def _argument(node: fx.Node, name: str, position: int, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _describe_dropout(node: fx.Node) -> NoiseDescriptor:
    x, p, _ = dropout_arguments(node)
    return mask_descriptor(node.name, x.meta["val"], 1.0 - p, drop_probability=p)


def mask_descriptor(
    name: str, like: torch.Tensor, keep: float, *, drop_probability: float | None = None
) -> NoiseDescriptor:
    """A draw of zeros and ones, laid out as ``like`` and held in one byte each."""
    spec = TensorSpec.of(torch.empty_like(like, dtype=torch.bool))
    return NoiseDescriptor(name, spec, aten.bernoulli_.float, (spec, keep), {}, drop_probability)


def _describe_draw(node: fx.Node) -> NoiseDescriptor:
    op: Any = node.target
    if op._schema.name not in READS_METADATA_ONLY and op not in METADATA_ONLY_OVERLOADS:
        raise UnsupportedOperatorError(
            f"{op} draws random numbers from values that the graph computes, so the draw cannot "
            "be made beforehand"
        )
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise UnsupportedOperatorError(f"{op} draws several results at once")
    if op is aten.bernoulli.p:
        if not value.is_contiguous():
            raise UnsupportedOperatorError(
                f"{op} draws in an order that depends on the strides of its input and on whether "
                "it stands for bernoulli_"
            )
        return mask_descriptor(node.name, value, float(_argument(node, "p", 1, 0.5)))
    args, kwargs = pytree.tree_map(_spec_of_node, (node.args, node.kwargs))
    drawn = _IN_PLACE.get(op, op)
    return NoiseDescriptor(node.name, TensorSpec.of(value), drawn, tuple(args), kwargs)


def memory_order(tensor: torch.Tensor | TensorSpec) -> tuple[int, ...]:
    """What the order of random numbers in a tensor depends on: strides that mean something."""
    stride = tensor.stride if isinstance(tensor, TensorSpec) else tensor.stride()
    return tuple(s for s, extent in zip(stride, tensor.shape, strict=True) if extent > 1)


def _spec_of_node(value: Any) -> Any:
    return TensorSpec.of(value.meta["val"]) if isinstance(value, fx.Node) else value


def draw_noise(noise: Sequence[NoiseDescriptor]) -> list[torch.Tensor]:
    """Make the draws with PyTorch's default generator; contiguous tensors, in order."""
    return [_draw(descriptor).contiguous() for descriptor in noise]


def _draw(descriptor: NoiseDescriptor) -> torch.Tensor:
    args = [_materialize(a) for a in descriptor.args]
    kwargs = {k: _materialize(v) for k, v in descriptor.kwargs.items()}
    result: torch.Tensor = descriptor.op(*args, **kwargs)
    return result


def _materialize(value: Any) -> Any:
    if not isinstance(value, TensorSpec):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)

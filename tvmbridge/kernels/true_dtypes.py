"""Correct the dtypes of results that PyTorch's fake kernels predict wrongly."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# The fourth and fifth operands are running statistics; the last two results are the updated ones.
_MOVING_STATISTICS = frozenset(
    {
        aten._native_batch_norm_legit_functional.default,
        aten._batch_norm_with_update_functional.default,
    }
)
_NORMS = frozenset(
    {
        *_MOVING_STATISTICS,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
    }
)
_BACKWARDS_OF_NORMS = frozenset(
    {
        aten.native_batch_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
    }
)
_CONVERSIONS = frozenset({aten._to_copy.default})
_HALVES = (torch.float16, torch.bfloat16)


def true_dtype(node: fx.Node, fake: torch.Tensor) -> torch.dtype:
    """Return the dtype that the operator of ``node`` really gives its result ``fake``."""
    operand: Any
    if node.target in _MOVING_STATISTICS:
        # Updated running statistics have the dtype of the running statistics.
        for place, result in zip((3, 4), node.meta["val"][-2:], strict=True):
            operand = node.args[place]
            if result is fake and operand is not None:
                found: torch.dtype = operand.meta["val"].dtype
                return found
    if node.target is aten.smooth_l1_loss_backward.default:
        operand = node.args[1]
        own: torch.dtype = operand.meta["val"].dtype
        return own
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    if node.target is flash and node.meta["val"][0].dtype is torch.float64:
        return torch.float64
    return _of_mixed_norm(node, fake) or fake.dtype


def _of_mixed_norm(node: fx.Node, fake: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of a result of a half-precision norm with float32 parameters.

    On the CPU such a norm saves its statistics in float32, and its backward returns the gradient in
    the operand's dtype. Return None for any other result, and if other operators read the result:
    they were traced for the fake dtype.
    """
    if node.target not in _NORMS | _BACKWARDS_OF_NORMS or fake.device.type != "cpu":
        return None
    place = next(i for i, value in enumerate(node.meta["val"]) if value is fake)
    backward = node.target in _BACKWARDS_OF_NORMS
    operand: Any = node.args[1 if backward else 0]
    dtype: torch.dtype = operand.meta["val"].dtype
    if dtype not in _HALVES or all(n.meta["val"].dtype is dtype for n in node.all_input_nodes):
        return None
    parts = [u for u in node.users if u.target is operator.getitem and u.args[1] == place]
    whole = [u for u in node.users if u.target is not operator.getitem]
    readers = {reader.target for reader in (*whole, *_readers(parts))}
    if backward:
        return dtype if place == 0 and readers <= _CONVERSIONS else None
    return torch.float32 if place in (1, 2) and readers <= _BACKWARDS_OF_NORMS else None


def _readers(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that read the values of ``nodes``, directly or through aliases."""
    for user in (user for node in nodes for user in node.users):
        if user.target is aten.alias.default:
            yield from _readers([user])
        else:
            yield user

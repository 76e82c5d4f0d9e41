"""Describe random draws of eager PyTorch and of the captured graph in one format.

Two draws with equal descriptions fill the same elements with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import ComputedTensor, NoiseDescriptor, TensorSpec
from tvmbridge.graph_capture.noise import READS_VALUES, RRELU_NAME, base_name, memory_order


def eager_draw(op: Any, args: Any, kwargs: Any, result: Any) -> str:
    """Describe an eager draw by what decides its numbers: operator, shape and memory order."""
    value = pytree.tree_leaves(result)[0]
    order = memory_order(value)
    if op is torch.ops.aten.native_dropout.default:
        return _mask(value.shape, order, 1.0 - args[1])
    if op in (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p):
        keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return _mask(value.shape, order, keep)
    operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return _in_words(op, TensorSpec.of(value), [TensorSpec.of(t) for t in operands])


def _in_words(op: Any, drawn: TensorSpec, operands: Sequence[TensorSpec]) -> str:
    words = f"{base_name(op)} {drawn.shape} {memory_order(drawn)} {drawn.dtype}"
    if base_name(op) not in (*READS_VALUES, RRELU_NAME):
        return words
    return f"{words} of {[(t.shape, memory_order(t), t.dtype) for t in operands]}"


def _mask(shape: Sequence[int], order: tuple[int, ...], keep: Any) -> str:
    """Describe a mask without dimensions of one element: PyTorch 2.15 adds some to attention's.

    The dimensions from outermost to innermost in memory decide the numbers.
    """
    nesting = sorted(range(len(order)), key=lambda dim: -order[dim])
    return f"mask {[extent for extent in shape if extent != 1]} {nesting} {keep}"


def captured_draw(noise: NoiseDescriptor) -> str:
    """Describe a random draw of the captured graph in the format of :func:`eager_draw`."""
    filled = noise.args[0] if noise.op._schema.is_mutable else noise.spec
    if noise.op is torch.ops.aten.bernoulli_.float:
        return _mask(noise.spec.shape, memory_order(filled), noise.args[1])
    if noise.op is torch.ops.aten.native_dropout.default:
        return _mask(noise.spec.shape, memory_order(noise.spec), 1.0 - noise.args[1])
    operands = [
        leaf.spec if isinstance(leaf, ComputedTensor) else leaf
        for leaf in pytree.tree_leaves((noise.args, dict(noise.kwargs)))
        if isinstance(leaf, ComputedTensor | TensorSpec)
    ]
    drawn = replace(noise.spec, stride=filled.stride)
    return _in_words(noise.op, drawn, operands)

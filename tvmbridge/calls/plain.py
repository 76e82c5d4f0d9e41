"""Refuse tensors that code cannot be compiled for, such as subclasses and sparse tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.assumptions import Question
from tvmbridge.core.contents import all_held, is_constant
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.sharding import is_distributed, is_flattened, sharded_within
from tvmbridge.core.torch_private import is_functional_tensor

# Exactly these classes: a subclass may override what operators do.
PLAIN = (torch.Tensor, nn.Parameter)


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of PyTorch's own classes, strided and not nested."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def has_no_shape(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a strided nested tensor, which has neither a shape nor strides."""
    return tensor.is_nested and tensor.layout is torch.strided


def unusual(tensor: torch.Tensor) -> str | None:
    """Return why ``tensor`` is not plain, as a predicate ("is quantized"); None if it is plain."""
    if type(tensor) not in PLAIN:
        return f"is a {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    kinds = {
        "a quantized tensor": tensor.is_quantized,
        "a nested tensor": tensor.is_nested,
        "a zero tensor": tensor._is_zerotensor(),
        "on the meta device": tensor.is_meta,
        "a tensor of a function transform": is_functional_tensor(tensor),
    }
    return next((f"is {kind}" for kind, present in kinds.items() if present), None)


def is_unseen(leaf: Any) -> bool:
    """Whether a leaf of the arguments is an object of an unregistered class that holds tensors."""
    if isinstance(leaf, torch.Tensor | nn.Module) or is_constant(leaf):
        return False
    return any(isinstance(held, torch.Tensor) for held in all_held(leaf))


def other_answer(
    asks: Collection[Question], given: Sequence[Any], own: Iterable[torch.Tensor | None]
) -> Reason | None:
    """Return why a property that forward reads may differ in a trace, or None."""
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    if Question.CLASS in asks and any(type(t) is not torch.Tensor for t in tensors):
        return Reason(Kind.ASKS_CLASS)
    if Question.OFFSET in asks and any(
        t is not None and t.storage_offset() for t in (*tensors, *own)
    ):
        return Reason(Kind.ASKS_OFFSET)
    if Question.IDENTITY in asks:
        # Tied parameters are left out of ``own``: the tensors were different during the capture.
        present = [*tensors, *(t for t in own if t is not None)]
        if len(set(map(id, present))) < len(present):
            return Reason(Kind.ASKS_IDENTITY)
    return None


def split_over_ranks(module: nn.Module) -> Reason | None:
    """Return why a module is not served whose parameters are split over processes, or None."""
    sharded = sharded_within(module)
    if sharded is not None:
        return Reason(Kind.SHARDED_WITHIN, sharded)
    if is_flattened(module):
        return Reason(Kind.SHARDED_WHOLE)
    return None


def distributed_in(module: nn.Module) -> Reason | None:
    """Return why no single graph has a module some of whose tensors are DTensors, or None."""
    name = next((n for n, t in tensors_of(module).items() if is_distributed(t)), None)
    return None if name is None else Reason(Kind.DISTRIBUTED, name)


def unusual_in(module: nn.Module, leaves: Sequence[Any] = ()) -> Reason | None:
    """Return why a tensor or leaf cannot be traced, for the first one; None if all can.

    The tensors of the module and the ``leaves`` of its arguments are checked. Tracing some kinds of
    tensors would end the process.
    """
    sharded = split_over_ranks(module) or distributed_in(module)
    if sharded is not None:
        return sharded
    arguments = {f"argument {i}": leaf for i, leaf in enumerate(leaves)}
    for name, value in {**arguments, **tensors_of(module)}.items():
        reason = unusual(value) if isinstance(value, torch.Tensor) else None
        if is_unseen(value):
            return Reason(Kind.UNSEEN, f"{name} is a {type(value).__name__}")
        if is_distributed(value):
            return Reason(Kind.DISTRIBUTED, name)
        if reason is not None and name in arguments:
            return Reason(Kind.UNUSUAL, f"{name} {reason}")
        if reason is not None and is_lazy(value):
            return Reason(Kind.UNINITIALIZED, name, settles=True)
        if reason is not None and value.is_meta:
            return Reason(Kind.WITHOUT_VALUES, name)
        if reason is not None:
            return Reason(Kind.HELD_UNUSUAL, f"{name} {reason}")
    for owner in module.modules():
        for name, held in owner._parameters.items():
            if held is not None and not isinstance(held, nn.Parameter):
                return Reason(Kind.FUNCTIONAL_CALL, name)
    return None

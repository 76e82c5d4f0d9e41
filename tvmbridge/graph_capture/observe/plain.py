"""Refuse tensors that code cannot be compiled for, such as subclasses and sparse tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import Question
from tvmbridge.core.contents import all_held, is_constant
from tvmbridge.core.sharding import sharded_within
from tvmbridge.core.torch_private import is_functional_tensor
from tvmbridge.graph_capture.trace.standins import tensors_of

# Exactly these classes: a subclass may override what operators do.
PLAIN = (torch.Tensor, nn.Parameter)
UNSEEN = "an argument is an object whose tensors PyTorch does not see"
OPEN_IT = (
    "pass the tensors in it, or a dict of them, or register its class with "
    "torch.export.register_dataclass or torch.utils._pytree.register_pytree_node"
)


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
) -> str | None:
    """Return why a property that forward reads may differ in a trace, or None.

    Args:
        asks: the properties that forward reads.
        given: the leaves of the sample's arguments.
        own: the module's tensors.
    """
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    if Question.CLASS in asks and any(type(t) is not torch.Tensor for t in tensors):
        return "an argument is a parameter, and forward asks for the class of tensors"
    if Question.OFFSET in asks and any(
        t is not None and t.storage_offset() for t in (*tensors, *own)
    ):
        return "a tensor starts within its memory, and forward asks for that"
    if Question.IDENTITY in asks:
        different = set(map(id, tensors))
        if len(different) < len(tensors) or not different.isdisjoint(map(id, own)):
            return "one tensor is given twice, and forward asks whether tensors are one"
    return None


def unusual_in(module: nn.Module, leaves: Sequence[Any] = ()) -> str | None:
    """Return a sentence about the first tensor or leaf that cannot be traced; None if all can.

    The tensors of the module and the ``leaves`` of its arguments are checked. Tracing some kinds of
    tensors would end the process.
    """
    sharded = sharded_within(module)
    if sharded is not None:
        return (
            f"its submodule {sharded} is sharded by itself (fully_shard), and one compiled "
            f"function cannot gather its parameters in between: dispatch {sharded} and the other "
            "sharded submodules instead"
        )
    arguments = {f"argument {i}": leaf for i, leaf in enumerate(leaves)}
    for name, value in {**arguments, **tensors_of(module)}.items():
        reason = unusual(value) if isinstance(value, torch.Tensor) else None
        if is_unseen(value):
            return f"{name} is a {type(value).__name__}: {UNSEEN}; {OPEN_IT}"
        if reason is not None:
            return f"{name} {reason}, and code is compiled for plain, dense tensors"
    for owner in module.modules():
        for name, held in owner._parameters.items():
            if held is not None and not isinstance(held, nn.Parameter):
                return f"a tensor that is no parameter stands in for {name} (functional_call)"
    return None

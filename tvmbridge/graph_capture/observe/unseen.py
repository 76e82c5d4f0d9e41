"""Unseen: find functions that an observation of forward does not run, though code contains them.

PyTorch calls the functions of gradients in backward, which an observation does not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from tvmbridge.core.torch_private import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    custom_op_definition,
)

# The methods of a custom autograd function that compute gradients.
_OF_FUNCTIONS = ("backward", "vjp", "jvp")
# The attributes of a custom operator's definition that hold functions for its gradients.
_OF_OPERATORS = ("_backward_fn", "_setup_context_fn")


def gradient_functions(value: Any) -> Iterator[Any]:
    """Yield what computes the gradients of ``value``, if it is a custom function or operator."""
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        for name in _OF_FUNCTIONS:
            yield inspect.getattr_static(value, name, None)
    elif isinstance(value, OpOverloadPacket):
        for name in value.overloads():
            yield from gradient_functions(getattr(value, name))
    elif isinstance(value, CustomOpDef | OpOverload):
        definition = custom_op_definition(value)
        for name in _OF_OPERATORS:
            yield getattr(definition, name, None)

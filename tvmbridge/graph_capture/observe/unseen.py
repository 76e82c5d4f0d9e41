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

# The methods of a custom autograd function, and the attributes of a custom operator's definition,
# that compute gradients in backward.
_IN_BACKWARD = (("backward", "vjp"), ("_backward_fn",))
# The others that belong to gradients: the first one is for forward-mode differentiation.
_BESIDE = (("jvp",), ("_setup_context_fn",))


def gradient_functions(value: Any) -> Iterator[Any]:
    """Yield all functions for the gradients of ``value``, a custom function or operator."""
    yield from backward_functions(value)
    yield from _functions(value, *_BESIDE)


def backward_functions(value: Any) -> Iterator[Any]:
    """Yield the functions that backward of ``value``, a custom function or operator, calls."""
    yield from _functions(value, *_IN_BACKWARD)


def _functions(value: Any, methods: tuple[str, ...], attributes: tuple[str, ...]) -> Iterator[Any]:
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        for name in methods:
            yield inspect.getattr_static(value, name, None)
    elif isinstance(value, OpOverloadPacket):
        for name in value.overloads():
            yield from _functions(getattr(value, name), methods, attributes)
    elif isinstance(value, CustomOpDef | OpOverload):
        definition = custom_op_definition(value)
        for name in attributes:
            yield getattr(definition, name, None)

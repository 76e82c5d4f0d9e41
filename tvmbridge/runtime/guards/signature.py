"""Signatures: what a call's arguments must be for the code that was compiled for others."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.contents import same_value
from tvmbridge.core.torch_private import has_storage, pytree
from tvmbridge.graph_capture.observe.plain import PLAIN


class Signature:
    """Structure, shapes, dtypes, devices and constants of the arguments of a call.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        forward: what is called with them. Keywords that it has no parameters of its own for are
            seen by it in their order.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> None:
        leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
        self.keywords = tuple(kwargs)
        self.ordered = _unnamed(forward, kwargs) if forward is not None and len(kwargs) > 1 else ()
        self.num_args = len(args)
        # Arguments that are leaves themselves need no flattening at a call.
        arguments = [*args, *kwargs.values()]
        self.flat = len(leaves) == len(arguments) and all(map(operator.is_, leaves, arguments))
        self.tensors = [
            (i, leaf.shape, leaf.dtype, leaf.device)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        self.constants = [
            (i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)
        ]

    @property
    def device_type(self) -> str:
        """The device type of the tensors among the arguments."""
        return self.tensors[0][3].type if self.tensors else "cpu"

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a call in the order of the signature; None: another structure."""
        if len(args) != self.num_args or kwargs.keys() != set(self.keywords):
            return None
        if self.ordered and tuple(k for k in kwargs if k in self.ordered) != self.ordered:
            return None
        if self.flat:
            return [*args, *(kwargs[k] for k in self.keywords)]
        leaves, spec = pytree.tree_flatten((args, {k: kwargs[k] for k in self.keywords}))
        return leaves if spec == self.spec else None

    def match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | str:
        """The leaves of a call that fits the signature, or why it does not."""
        leaves = self.flatten(args, kwargs)
        if leaves is None:
            return "the structure of the arguments differs"
        return self.mismatch(leaves) or leaves

    def mismatch(self, leaves: Sequence[Any]) -> str | None:
        """Why ``leaves`` do not fit the signature; None when they do."""
        for i, shape, dtype, device in self.tensors:
            leaf = leaves[i]
            if type(leaf) not in PLAIN:
                return "an argument is not a plain tensor"
            if leaf.layout is not torch.strided or leaf.is_nested or leaf._is_zerotensor():
                return "the layout of an input differs"
            if not has_storage(leaf):
                return "an argument has left a function transform"
            if leaf.shape != shape:
                return "the shape of an input differs"
            if leaf.dtype is not dtype:
                return "the dtype of an input differs"
            if leaf.device != device:
                return "the device of an input differs"
        for i, value in self.constants:
            leaf = leaves[i]
            if leaf is not value and not same_value(leaf, value):
                return "an argument that is not a tensor differs"
        return None

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
            for _, shape, dtype, _ in self.tensors
        )
        return f"({shapes})"


def _unnamed(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The keywords that ``forward`` takes without a parameter of that name, in their order."""
    named = inspect.signature(forward).parameters
    return tuple(k for k in kwargs if k not in named)

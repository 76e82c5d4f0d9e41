"""A sample: the module, its arguments, draws and cotangents, in one precision.

The same numbers stand in every precision: what the module holds in its own dtype is converted,
never drawn again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tvmbridge.core.libraries import register_caches
from tvmbridge.graph_capture.trace.standins import STAND_IN


@dataclass
class Sample:
    """A module and what one call of it gets, in one precision.

    ``draws`` are the random numbers of a call in program order, ``cotangents`` the gradients that
    arrive for its outputs by name, ``output_names`` the names of the leaves of what forward
    returns; the first run of eager PyTorch fills them. The module is a copy that nobody else holds.
    """

    module: nn.Module
    leaves: list[Any]
    structure: pytree.TreeSpec
    draws: list[torch.Tensor] | None = None
    cotangents: dict[str, torch.Tensor] = field(default_factory=dict)
    output_names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sample:
        """A copy of the module and of the arguments, as they are."""
        register_caches(module)
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        return cls(_copied(module), _fresh(leaves, None), structure)

    def in_float64(self) -> Sample:
        """The same numbers in float64."""
        draws = None if self.draws is None else [_widened(d) for d in self.draws]
        return Sample(
            copy.deepcopy(self.module).double(),
            _fresh(self.leaves, torch.float64),
            self.structure,
            draws,
            {name: _widened(ct) for name, ct in self.cotangents.items()},
            self.output_names,
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Arguments of one call, which it may write into, and their leaves."""
        leaves = _fresh(self.leaves, None)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs, leaves

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The floating-point dtypes of the module's state and of the arguments, each once."""
        held = [*self.module.parameters(), *self.module.buffers(), *self.leaves]
        floating = [t for t in held if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return list(dict.fromkeys(t.dtype for t in floating))

    @contextmanager
    def unchanged_state(self) -> Iterator[None]:
        """After it the module's buffers hold the values that they held before."""
        before = [(b, b.detach().clone()) for b in self.module.buffers()]
        held = [(m, dict(m._buffers)) for m in self.module.modules()]
        try:
            yield
        finally:
            for module, buffers in held:
                module._buffers.update(buffers)
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


def _copied(module: nn.Module) -> nn.Module:
    """A copy that is not dispatched, and without gradients."""
    made = copy.deepcopy(module, {STAND_IN: True})  # type: ignore[dict-item]
    for parameter in made.parameters():
        parameter.grad = None
    return made


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _fresh(leaves: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """Copies of the tensors, which require a gradient as they do; floats in ``dtype``."""
    made = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            value = leaf.detach().clone()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            leaf = value.requires_grad_(leaf.requires_grad)
        made.append(leaf)
    return made

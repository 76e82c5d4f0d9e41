"""A sample: a module, its arguments, random draws and cotangents, in one precision.

A sample in another precision has the same numbers: they are converted, and never drawn again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.standins import without_dispatch
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.torch_private import pytree


@dataclass
class Sample:
    """A copy of a module and the inputs of one call, in one precision.

    No run writes into the module or the leaves. The first run of eager PyTorch fills the last three
    fields.

    - ``leaves``, ``structure``: the arguments as leaves, and their pytree structure.
    - ``draws``: the random draws of a call, in program order; None before the first run.
    - ``cotangents``: the cotangents of the outputs, by name.
    - ``output_names``: the names of the leaves of the value that forward returns.
    """

    module: nn.Module
    leaves: list[Any]
    structure: pytree.TreeSpec
    draws: list[torch.Tensor] | None = None
    cotangents: dict[str, torch.Tensor] = field(default_factory=dict)
    output_names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sample:
        """Copy the module, without dispatch and gradients, and the arguments."""
        register_containers(module)
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        made = without_dispatch(module)
        for parameter in made.parameters():
            parameter.grad = None
        return cls(made, _fresh(leaves), structure)

    def in_float64(self) -> Sample:
        """Return a copy of the sample with the same numbers in float64."""
        return Sample(
            copy.deepcopy(self.module).double(),
            _fresh(self.leaves, torch.float64),
            self.structure,
            None if self.draws is None else _fresh(self.draws, torch.float64),
            {name: _fresh([ct], torch.float64)[0] for name, ct in self.cotangents.items()},
            self.output_names,
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Return new copies of args and kwargs, which a call may write into, and their leaves."""
        leaves = _fresh(self.leaves)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs, leaves

    def tensor(self, name: str) -> torch.Tensor:
        """Return the input ``input N``, or the module's tensor with the dotted name ``name``."""
        if name.startswith("input "):
            value: torch.Tensor = self.leaves[int(name.removeprefix("input "))]
        else:
            path, _, attribute = name.rpartition(".")
            value = getattr(self.module.get_submodule(path), attribute)
        return value

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The floating-point dtypes of the module's state and of the arguments, each once."""
        held = [*self.module.parameters(), *self.module.buffers(), *self.leaves]
        floating = [t for t in held if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return list(dict.fromkeys(t.dtype for t in floating))


def _fresh(leaves: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Copy the tensors with their ``requires_grad``; convert floats to ``dtype`` if given."""
    made = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            value = leaf.detach().clone()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            leaf = value.requires_grad_(leaf.requires_grad)
        made.append(leaf)
    return made


def state_name(name: str) -> str:
    """Return the result's name for the value of an input or buffer after the call."""
    return f"{name} after the call"

"""Graphs of the functions of a higher-order operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import pytree

# Stands for a tensor among the leaves of what a function returns.
TENSOR = object()


@dataclass(frozen=True)
class RegionTensor:
    """The properties of a tensor for which a graph was traced.

    - ``shape``, ``strides``, ``dtype``, ``device``: those of the tensor, but a dimension with at
      most one element has a stride of 1
    - ``requires_grad``: whether its gradient is wanted; ignored in comparisons
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> RegionTensor:
        sizes = (*tensor.shape, *tensor.stride())
        if tensor.layout is not torch.strided or any(type(size) is not int for size in sizes):
            raise UnsupportedOperatorError(
                "an operand of a higher-order operator has symbolic sizes, or no strides"
            )
        shape = tuple(tensor.shape)
        strides = tuple(s if n > 1 else 1 for n, s in zip(shape, tensor.stride(), strict=True))
        return cls(shape, strides, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if self.requires_grad and torch.is_grad_enabled():
            made.requires_grad_()
        return made

    def fitted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a copy with these strides if its properties differ."""
        if RegionTensor.of(tensor) == self:
            return tensor
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return made.copy_(tensor)


@dataclass(frozen=True, eq=False)
class Graph:
    """A function as a graph, whose inputs are its operands and then the captured tensors.

    - ``module``: the graph
    - ``captured``: the indices of the tensors that it reads in addition to its operands
    - ``structure``: the structure of the function's results
    - ``leaves``: the leaves of the results; ``TENSOR`` stands for a tensor that the graph computes
    """

    module: fx.GraphModule
    captured: tuple[int, ...]
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def __call__(self, operands: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> Any:
        found = iter(self.module(*operands, *captured))
        results = [next(found) if leaf is TENSOR else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(results, self.structure)

    def content(self) -> list[Any]:
        """Return text and numbers that differ between graphs with different code or constants."""
        constants = [
            (name, str(value.dtype), tuple(value.shape), value.tolist())
            for name, value in sorted(constants_of(self.module).items())
        ]
        described = [str(self.structure), self.captured]
        leaves = ["tensor" if leaf is TENSOR else repr(leaf) for leaf in self.leaves]
        return [self.module.code, constants, described, leaves]


def constants_of(module: fx.GraphModule) -> dict[str, Any]:
    names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    return {name: getattr(module, name) for name in names}

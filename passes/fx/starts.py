"""Starts of chains: equal tensors, such as slices of one tensor, that a pass fuses into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import fx

from tvmbridge.passes.fx.base import Emitter, nbytes
from tvmbridge.passes.fx.slices import Slice, side_by_side, stacked

aten = torch.ops.aten


class Start(Protocol):
    """The equal tensors that N equal chains of operators begin at, and how they become one tensor.

    - ``nodes``: the nodes of the tensors, one for each chain.
    - ``replaces``: whether :meth:`value` replaces ``nodes``, which are then erased if nothing
      reads them any more. Otherwise the nodes stay, as views.
    - ``copied``: bytes that are copied to make one tensor of them.
    """

    nodes: tuple[fx.Node, ...]
    replaces: bool
    copied: int

    def value(self, emit: Emitter) -> tuple[fx.Node, int]:
        """Emit one tensor of all nodes; return it and its dimension that counts the nodes.

        Raises:
            NotStackedError: the nodes cannot become one tensor.
        """


class Slices:
    """A start at equal slices of one tensor, in the order of their positions in it."""

    replaces = False

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.nodes = tuple(s.node for s in slices)
        self._slices = slices
        self._is_view = side_by_side(slices)
        self.copied = 0 if self._is_view else 2 * len(slices) * nbytes(slices[0].node)

    def value(self, emit: Emitter) -> tuple[fx.Node, int]:
        """Emit a view of the tensor if the slices adjoin, and otherwise a stack of the slices."""
        if self._is_view:
            return stacked(self._slices, emit)
        dim = self._slices[0].dim
        return emit(aten.stack.default, list(self.nodes), dim), dim

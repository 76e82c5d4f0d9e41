"""What chains begin at: equal tensors that become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import fx

from tvmbridge.passes.fx.base import Emitter, nbytes
from tvmbridge.passes.fx.slices import Slice, side_by_side, stacked

aten = torch.ops.aten


class Start(Protocol):
    """What chains begin at: equal tensors, and how all of them are one.

    ``replaces``: its value takes the place of the nodes, which are erased where nothing reads them;
    otherwise they stay, as views. ``copied``: the bytes that are copied for it.
    """

    nodes: tuple[fx.Node, ...]
    replaces: bool
    copied: int

    def value(self, emit: Emitter) -> tuple[fx.Node, int]:
        """One tensor of all, and its dimension that counts them.

        Raises:
            Declined: there is none.
        """


class Slices:
    """Chains that begin at equal slices of one tensor, in the order of their places."""

    replaces = False

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.nodes = tuple(s.node for s in slices)
        self._slices = slices
        self._is_view = side_by_side(slices)
        self.copied = 0 if self._is_view else 2 * len(slices) * nbytes(slices[0].node)

    def value(self, emit: Emitter) -> tuple[fx.Node, int]:
        """A view of the tensor, or the slices stacked."""
        if self._is_view:
            return stacked(self._slices, emit)
        dim = self._slices[0].dim
        return emit(aten.stack.default, list(self.nodes), dim), dim

"""The colors of a joint function's picture: forward, kept, backward, and computed twice."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

Attributes = dict[str, str]

FORWARD = {"fillcolor": "#f4b6b0", "color": "#c0392b"}
RESIDUAL = {"fillcolor": "#f9e08b", "color": "#b7950b", "penwidth": "2"}
BACKWARD = {"fillcolor": "#aecdf2", "color": "#2460a7"}
REPEATED = {"fillcolor": "#f4b6b0:#aecdf2", "color": "#7d3c98", "style": "filled,dashed"}


class Colored(Protocol):
    """What ``tvmbridge.coloring.Coloring`` says of each binding."""

    @property
    def forward(self) -> Sequence[Any]:
        """Bindings that run in forward."""

    @property
    def backward(self) -> Sequence[Any]:
        """Bindings that run in backward."""

    @property
    def residuals(self) -> Collection[Any]:
        """Variables that forward keeps for backward."""

    @property
    def drawn(self) -> Collection[Any]:
        """Random draws that backward reads."""

    @property
    def repeated(self) -> Collection[Any]:
        """Variables that forward computes, and backward again."""


def node_colors(coloring: Colored) -> dict[Any, Attributes]:
    """graphviz attributes of each variable of a joint function.

    Forward is red, what is kept for backward yellow with a thick line, backward blue, and what
    both compute red and blue with a dashed line.
    """
    colors: dict[Any, Attributes] = {b.var: BACKWARD for b in coloring.backward}
    colors |= {b.var: FORWARD for b in coloring.forward}
    colors |= dict.fromkeys(coloring.repeated, REPEATED)
    colors |= dict.fromkeys((*coloring.residuals, *coloring.drawn), RESIDUAL)
    return colors

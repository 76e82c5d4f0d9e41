"""The colors of a joint function's picture: forward, kept values, backward, and repeated values."""

from __future__ import annotations

from typing import Any

from tvmbridge.coloring import Coloring
from tvmbridge.inspect.styles import Attributes

FORWARD = {"fillcolor": "#f4b6b0", "color": "#c0392b"}
RESIDUAL = {"fillcolor": "#f9e08b", "color": "#b7950b", "penwidth": "2"}
BACKWARD = {"fillcolor": "#aecdf2", "color": "#2460a7"}
REPEATED = {"fillcolor": "#f4b6b0:#aecdf2", "color": "#7d3c98", "style": "filled,dashed"}

#: The legend's text for each fill color.
COLOR_NAMES = (
    ("forward", FORWARD["fillcolor"]),
    ("kept for backward", RESIDUAL["fillcolor"]),
    ("backward", BACKWARD["fillcolor"]),
    ("computed by both", REPEATED["fillcolor"]),
)


def node_colors(coloring: Coloring) -> dict[Any, Attributes]:
    """Return the graphviz attributes of each variable of a joint function.

    Forward is red, and backward is blue. Values that are kept for backward are yellow with a thick
    line. Values that both forward and backward compute are red and blue with a dashed line.
    """
    colors: dict[Any, Attributes] = {b.var: BACKWARD for b in coloring.backward}
    colors |= {b.var: FORWARD for b in coloring.forward}
    colors |= dict.fromkeys(coloring.repeated, REPEATED)
    colors |= dict.fromkeys((*coloring.residuals, *coloring.drawn), RESIDUAL)
    return colors

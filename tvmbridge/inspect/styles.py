"""The graphviz attributes of each kind of node, edge and frame, and its name in the legend."""

from __future__ import annotations

from typing import Final

Attributes = dict[str, str]

GRAPH: Final = {
    "rankdir": "TB",
    "fontname": "Helvetica",
    "fontsize": "12",
    "nodesep": "0.18",
    "ranksep": "0.32",
    "pad": "0.2",
}
NODE: Final = {
    "fontname": "Helvetica",
    "fontsize": "11",
    "shape": "box",
    "style": "rounded,filled",
    "fillcolor": "#ffffff",
    "color": "#80868b",
    "margin": "0.09,0.04",
    "height": "0.2",
    "width": "0.3",
}
EDGE: Final = {
    "fontname": "Helvetica",
    "fontsize": "8",
    "color": "#5f6368",
    "fontcolor": "#80868b",
    "arrowsize": "0.5",
    "labelangle": "-22",
    "labeldistance": "1.5",
}
_ROUND: Final = {"shape": "ellipse", "style": "filled", "margin": "0.02,0.02"}
FOLDED: Final = {"shape": "box3d", "style": "filled", "fillcolor": "#fff7e6", "margin": "0.15,0.08"}
LEGEND: Final = {"shape": "plaintext", "style": "", "fontsize": "9"}
FUNCTION_FRAME: Final = {"style": "rounded", "color": "#9aa0a6", "margin": "12"}
BRANCH_FRAME: Final = {"style": "rounded,dashed", "color": "#9aa0a6"}
# The fill of a frame by its depth, so that a frame differs from the one around it.
_FILLS: Final = ("#f8fafd", "#f1f5fb", "#e9f0f9", "#e1eaf6")

#: The graphviz attributes of each kind of node.
KINDS: Final[dict[str, Attributes]] = {
    "input": {**_ROUND, "fillcolor": "#e8f0fe"},
    "weight": {**_ROUND, "fillcolor": "#f1f3f4"},
    "free": {**_ROUND, "style": "filled,dashed", "fillcolor": "#ffffff"},
    "output": {**_ROUND, "fillcolor": "#d2e3fc", "peripheries": "2"},
    "gradient": {**_ROUND, "fillcolor": "#dcebdd", "peripheries": "2"},
    "op": {},
    "function": {"fillcolor": "#e4f7fb"},
    "tir": {"fillcolor": "#e6f4ea"},
    "packed": {"fillcolor": "#fef7e0"},
    "aten": {"fillcolor": "#fce8e6"},
    "branch": {"shape": "hexagon", "style": "filled", "fillcolor": "#fef7e0"},
    "tuple": {"fillcolor": "#f3e8fd"},
    "small": {"style": "filled", "fillcolor": "#f8f9fa", "color": "#dadce0"},
    "folded": FOLDED,
}
#: The kinds that are operators or calls of functions.
CALLS: Final = frozenset({"op", "tir", "packed", "aten", "function"})
#: The name of each kind in the legend.
NAMES: Final = {
    "input": "input",
    "weight": "weight or buffer",
    "output": "output",
    "gradient": "gradient that is returned",
    "op": "operator, compiled by TVM",
    "tir": "TVM's loops",
    "packed": "kernel of a library",
    "aten": "ATen call, PyTorch's kernel",
    "function": "function of the module",
    "folded": "submodule, folded",
}


def submodule_frame(depth: int) -> Attributes:
    """Return the graphviz attributes of the frame around a submodule at a depth from 1 on."""
    fill = _FILLS[min(depth, len(_FILLS)) - 1]
    return {"style": "rounded,filled", "fillcolor": fill, "color": "#c3cfe2", "margin": "8"}

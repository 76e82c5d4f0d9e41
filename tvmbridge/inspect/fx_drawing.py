"""Draw torch.fx graphs with graphviz, for example before and after fx passes.

The weights that an operator reads share one node. Operators are boxes with their results' shapes.
"""

from __future__ import annotations

from typing import Any

import graphviz
import torch
from torch import fx

from tvmbridge.passes.fx.base import LEAVES, is_operator

_ENDS = {"shape": "ellipse", "style": "filled", "fillcolor": "#e8eef7"}
_STEPS = {"shape": "box", "style": "rounded,filled", "fillcolor": "#ffffff"}
_MOST_WEIGHTS = 3


def draw_graph_module(graph_module: fx.GraphModule) -> graphviz.Digraph:
    """Draw the graph; `dot` is not run."""
    drawn = graphviz.Digraph()
    drawn.attr("graph", rankdir="TB")
    drawn.attr("node", fontname="Helvetica,sans-Serif", fontsize="11")
    weights = {n for n in graph_module.graph.nodes if _is_weight(n)}
    for node in graph_module.graph.nodes:
        if node in weights or (node.op == "placeholder" and not node.users):
            continue
        style = _STEPS if node.op.startswith("call") else _ENDS
        drawn.node(node.name, _label(node), **style)
        for each in node.all_input_nodes:
            if each not in weights:
                drawn.edge(each.name, node.name)
        own = [n.name for n in node.all_input_nodes if n in weights]
        if own:
            shown = own[:_MOST_WEIGHTS] + [f"and {len(own) - _MOST_WEIGHTS} more"] * (
                len(own) > _MOST_WEIGHTS
            )
            drawn.node(f"weights of {node.name}", "\n".join(shown), shape="plaintext")
            drawn.edge(f"weights of {node.name}", node.name, style="dashed")
    return drawn


def _is_weight(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and str(node.target).startswith(("p_", "b_", "c_"))


def _label(node: fx.Node) -> str:
    target: Any = node.target
    name = str(target)
    if is_operator(node):
        name = target._schema.name.partition("::")[2]
    elif callable(target):
        name = getattr(target, "__name__", name)
    elif node.op in LEAVES:
        name = node.name
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes = "×".join(str(s) for s in value.shape)
        return f"{name}\n{sizes}"
    return name

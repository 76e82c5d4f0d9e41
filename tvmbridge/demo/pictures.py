"""Pictures of one BERT layer: as captured, lowered, and as the colored joint function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graphviz
import torch
from torch import nn

from tvmbridge import capture, to_relax, visualize
from tvmbridge.coloring import Coloring, color
from tvmbridge.differentiate import differentiate
from tvmbridge.pipeline import lowering_passes, run_passes
from tvmbridge.types import PassRecord

FORWARD = {"fillcolor": "#f4b6b0", "color": "#c0392b"}
RESIDUAL = {"fillcolor": "#f9e08b", "color": "#b7950b", "penwidth": "2"}
BACKWARD = {"fillcolor": "#aecdf2", "color": "#2460a7"}


def draw_layer(layer: nn.Module, hidden_states: torch.Tensor, folder: Path) -> list[Path]:
    """Draw a layer in train mode; return the files that were written.

    ``layer_before_passes`` is the graph as it comes from PyTorch, ``layer_after_passes`` with
    dropout and layer norm spelled out, ``joint_colored`` forward and backward in one function:
    forward red, what it keeps for backward yellow, backward blue. They are SVG files, or their
    sources for graphviz where its program ``dot`` is not installed.
    """
    captured = capture(layer, hidden_states)
    before = to_relax(captured)
    records: list[PassRecord] = []
    after = run_passes(before, lowering_passes(), records)
    wanted = [d.name for d in captured.inputs if d.requires_grad]
    joint = differentiate(before, wanted, [0], records)
    colors = node_colors(color(joint))
    graphs = {
        "layer_before_passes": visualize(before),
        "layer_after_passes": visualize(after),
        "joint_colored": visualize(joint.mod["joint"], node_attr_dict=colors),
    }
    return [_write(graph, folder / name) for name, graph in graphs.items()]


def node_colors(coloring: Coloring) -> dict[Any, dict[str, str]]:
    """graphviz attributes of each variable of a joint function."""
    colors: dict[Any, dict[str, str]] = {b.var: BACKWARD for b in coloring.backward}
    colors |= {b.var: FORWARD for b in coloring.forward}
    colors |= dict.fromkeys(coloring.residuals, RESIDUAL)
    return colors


def _write(graph: graphviz.Digraph, stem: Path) -> Path:
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_suffix(".svg")
    try:
        path.write_bytes(graph.pipe(format="svg"))
    except graphviz.ExecutableNotFound:
        path = stem.with_suffix(".dot")
        path.write_text(graph.source, encoding="utf-8")
    return path

"""Draw the graphs of one BERT layer: captured, lowered, and the colored joint function."""

from __future__ import annotations

from pathlib import Path

import graphviz
import torch
from torch import nn

from tvmbridge import capture, to_relax, visualize
from tvmbridge.coloring import color, policy_for
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.differentiation.differentiate import differentiate
from tvmbridge.pipeline import lowering_passes, run_passes


def draw_layer(layer: nn.Module, hidden_states: torch.Tensor, folder: Path) -> list[Path]:
    """Draw the graphs of a layer in train mode, and return the files that were written.

    - ``layer_before_passes``: the Relax function of the captured graph.
    - ``layer_after_passes``: the same with dropout and layer norm lowered to simpler operators.
    - ``joint_colored``: forward and backward in one function. Forward is red, values that it keeps
      for backward are yellow, backward is blue, and values that both compute are dashed.

    The files are SVGs, or graphviz sources (``.dot``) if the program ``dot`` is not installed.
    """
    captured = capture(layer, hidden_states)
    before = to_relax(captured)
    records: list[PassRecord] = []
    after = run_passes(before, lowering_passes(), records)
    wanted = [d.name for d in captured.inputs if d.requires_grad]
    joint = differentiate(before, wanted, [0], records)
    coloring = color(joint, policy_for(CompileOptions().residual_policy, hidden_states.device))
    graphs = {
        "layer_before_passes": visualize(before),
        "layer_after_passes": visualize(after),
        "joint_colored": visualize(joint.mod["joint"], coloring=coloring),
    }
    return [_write(graph, folder / name) for name, graph in graphs.items()]


def _write(graph: graphviz.Digraph, stem: Path) -> Path:
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_suffix(".svg")
    try:
        path.write_bytes(graph.pipe(format="svg"))
    except graphviz.ExecutableNotFound:
        path = stem.with_suffix(".dot")
        path.write_text(graph.source, encoding="utf-8")
    return path

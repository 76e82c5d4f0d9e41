"""``python -m tvmbridge visualize``: draw stages of a module as pictures or HTML pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import graphviz
from torch import nn

from tvmbridge.core.errors import BridgeError
from tvmbridge.inspect.page import missing_package, page
from tvmbridge.inspect.picture import Picture
from tvmbridge.inspect.stages import Stages
from tvmbridge.inspect.timing import seconds_alone
from tvmbridge.inspect.visualize import picture_of


@dataclass(frozen=True)
class Wishes:
    """The options of the command line.

    - ``stages``: the stages to draw; None: all stages of the module, each in a file of its own.
    - ``out``: the file to write; its suffix is the format.
    - ``fold``: the depth of the submodules to fold; 0: none; None: enough for a readable picture.
    - ``all_nodes``: whether small values have nodes of their own.
    - ``times``: whether the time of each operator is measured and shown.
    """

    stages: Sequence[str] | None
    out: Path
    fold: int | None = None
    all_nodes: bool = False
    times: bool = False


def draw(module: nn.Module, sample_input: Any, wishes: Wishes) -> list[str]:
    """Write a file for each stage, and return a message for each file.

    Raises:
        BridgeError: a stage cannot be drawn, or the program or package that draws is missing.
    """
    kind = wishes.out.suffix.lstrip(".").lower()
    missing = missing_package() if kind == "html" else None
    if missing is not None:
        raise BridgeError(missing)
    stages = Stages(module, sample_input)
    said = []
    for name in wishes.stages or stages.names:
        shown = stages.draw(name)
        drawn = picture_of(
            shown.graph,
            collapse_small=not wishes.all_nodes,
            coloring=shown.coloring,
            gradients=shown.gradients,
            seconds=seconds_alone(shown.graph) if wishes.times else {},
        )
        out = wishes.out
        if wishes.stages is None:
            out = out.with_stem(f"{out.stem}_{name}")
        title = f"{type(module).__name__}, {name}"
        said.append(_write(replace(drawn, title=drawn.title or title), title, out, wishes.fold))
    return said


def _write(drawn: Picture, title: str, out: Path, fold: int | None) -> str:
    kind = out.suffix.lstrip(".").lower()
    names = drawn.readable() if fold is None else drawn.at_depth(fold)
    if kind == "html":
        written = page(drawn, title, names).encode()
    else:
        graph = drawn.folded(names).digraph()
        try:
            written = graph.source.encode() if kind == "dot" else graph.pipe(format=kind)
        except graphviz.ExecutableNotFound as error:
            raise BridgeError(
                "graphviz's program dot is not on the PATH: install it, or use --out with .html "
                "or .dot"
            ) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(written)
    folded = f", with {len(names)} submodules folded (--fold 0: none)" if names else ""
    return f"wrote {out}{folded}"

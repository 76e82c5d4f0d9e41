"""Export one architecture, run it with the runtime, and compare with eager PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import tvmbridge_runtime
from torch.utils import _pytree as pytree

import tvmbridge
from tests.architectures.compare import TOLERANCES, difference
from tvmbridge.core.libraries import register_containers


def export_and_compare(
    model: torch.nn.Module, sample: Mapping[str, Any], tolerance: Any = None
) -> str:
    """Describe how the exported function differs from eager PyTorch; "" within tolerance."""
    dtype = next(model.parameters()).dtype
    register_containers(model)
    with torch.no_grad():
        expected = _tensors(model(**sample))
        inputs = [t.detach().contiguous().numpy() for t in _tensors(((), dict(sample)))]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.tvmb")
            tvmbridge.export(model, (), path, sample_kwargs=sample)
            found = _leaves(tvmbridge_runtime.load(path)(*inputs))
    if len(found) != len(expected):
        return f"{len(found)} outputs, and not {len(expected)}"
    for number, pair in enumerate(zip(found, expected, strict=True)):
        departure = difference(*pair, tolerance or TOLERANCES[dtype])
        if departure:
            return f"output {number}{departure}"
    return ""


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _leaves(structure: Any) -> list[torch.Tensor]:
    if isinstance(structure, Mapping):
        return [t for value in structure.values() for t in _leaves(value)]
    if isinstance(structure, list | tuple):
        return [t for value in structure for t in _leaves(value)]
    if isinstance(structure, numpy.ndarray | numpy.generic):
        return [torch.from_numpy(numpy.array(structure))]
    return []

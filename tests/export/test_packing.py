"""Weights of products are packed by the width of a tile, unless something else reads them too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tvmbridge_runtime
from torch import nn

import tvmbridge
from tvmbridge.exporting.packing import packed_weight
from tvmbridge.schedules.alone import this_machine
from tvmbridge.schedules.product_tiles import width_of


class Readers(nn.Module):
    """A module whose weights are read by products, by a product and a sum, and by a look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.odd = nn.Linear(64, 130), nn.Linear(130, 77, bias=False)
        self.summed = nn.Parameter(torch.randn(77, 77))
        self.table = nn.Embedding(70, 77)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.odd(torch.relu(self.wide(x)))
        first = self.wide(x[..., :1, :])
        squared = self.summed @ self.summed
        return y, first, y @ self.summed + self.summed[0], squared, self.table.weight @ y.mT


@pytest.mark.parametrize(
    "shape", [(1, 5, 64), pytest.param((3, 5, 64), marks=pytest.mark.slow)], ids=str
)
def test_packed_weights_give_the_products(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Readers().eval(), torch.randn(shape)
    path = tvmbridge.export(module, x, tmp_path / "model.tvmb")
    report = tvmbridge.compare_export(module, x, path)
    assert report.ok, report
    parameters = tvmbridge_runtime.read_manifest(path)["parameters"]
    shapes = [p["shape"] for p in parameters]
    width = width_of(this_machine())
    assert [-(-130 // width), 64, width] in shapes
    assert [77, 77] in shapes


def test_the_last_panel_has_the_last_columns() -> None:
    machine = this_machine()
    width = width_of(machine)
    weight = torch.randn(5, 2 * width + 3)
    panels = packed_weight(weight, machine)
    assert panels.shape == (3, 5, width)
    assert torch.equal(panels[1], weight[:, width : 2 * width])
    assert torch.equal(panels[2], weight[:, -width:])
    assert torch.equal(packed_weight(weight[:, :width], machine)[0], weight[:, :width])

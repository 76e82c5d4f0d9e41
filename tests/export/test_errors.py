"""One error of export names everything that needs PyTorch, with the lines of the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge


class Everything(nn.Module):
    """A module with a random draw, a write, a complex result, and operators without loops."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        values = torch.linalg.eigvalsh(x @ x.mT)
        return torch.fft.rfft(x), values + torch.rand_like(values), torch.linalg.svdvals(x)


def test_one_error_names_effects_and_operators(tmp_path: Path) -> None:
    with pytest.raises(tvmbridge.ExportError) as caught:
        tvmbridge.export(Everything().eval(), torch.randn(3, 4), tmp_path / "m")
    listed = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    for words in (
        "forward writes into calls",
        "random draw aten.rand_like",
        "result 0 is complex64",
        "aten._linalg_eigh",
        "aten._linalg_svd",
    ):
        (line,) = [line for line in listed if words in line]
        assert "test_errors.py:" in line, line
    assert not list(tmp_path.iterdir())


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Branches(), "branches by the values of its arguments"),
        (torch.jit.script(nn.ReLU()), "ScriptModule"),
        (
            torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}),
            r"torch.ao.nn.quantized.* in 0",
        ),
    ],
    ids=["branch", "script", "packed"],
)
def test_what_has_no_graph_is_an_export_error(
    module: nn.Module, words: str, tmp_path: Path
) -> None:
    with pytest.raises(tvmbridge.ExportError, match=words):
        tvmbridge.export(module.eval(), torch.randn(3, 4), tmp_path / "m")


@dataclasses.dataclass
class Record:
    total: torch.Tensor
    weights: tuple[torch.Tensor, ...]


class Weights(nn.Module):
    """A module that returns weights and views of them, in a dataclass."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), torch.arange(6.0)
        self.register_buffer("table", torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> Record:
        views = (self.table, self.table[1:3].t(), self.linear.weight, self.held[2:])
        return Record(self.linear(x), views)


def test_weights_may_be_results(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Weights().eval(), torch.randn(3, 4)
    path = tvmbridge.export(module, x, tmp_path / "m")
    compared = tvmbridge.compare_export(module, x, path)
    assert len(compared.outputs) == 5
    assert compared.ok, str(compared)


class Sum(nn.Module):
    """A layer that can be quantised, and is not: it adds floats."""

    def __init__(self) -> None:
        super().__init__()
        self.plus = torch.ao.nn.quantized.FloatFunctional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.plus.add(x, x)
        return result


def test_sums_of_floats_that_can_be_quantised_are_exported(tmp_path: Path) -> None:
    path = tvmbridge.export(Sum().eval(), torch.ones(3), tmp_path / "m")
    assert tvmbridge.compare_export(Sum().eval(), torch.ones(3), path).ok

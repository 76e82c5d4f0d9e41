"""Operators behind convolutions and products are fused into their loops, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import tvmbridge
from tvmbridge.core.options import CompileOptions
from tvmbridge.exporting import building
from tvmbridge.exporting.code import alone_code
from tvmbridge.exporting.epilogues import matched


class Convolutions(nn.Module):
    """Convolutions of several kinds with what may follow them, for images with some channels."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(12, 41, 1)
        self.depthwise = nn.Conv2d(41, 41, (3, 5), padding=(2, 2), groups=41, dilation=(2, 1))
        self.norm = nn.BatchNorm2d(41)
        self.narrow = nn.Conv2d(41, 12, 1, bias=False)
        self.strided = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.same = nn.Conv2d(16, 24, 3, padding=1)
        self.grouped = nn.Conv2d(24, 24, 3, padding=1, groups=3)
        self.linear = nn.Linear(24, 37)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = functional.hardswish(self.wide(x))
        deep = torch.relu(self.norm(self.depthwise(wide)))
        # Read twice: by the mean, and by the product with a factor for each channel.
        scaled = deep * functional.hardsigmoid(deep.mean((2, 3), keepdim=True))
        # The operand of a sum has its shape, one channel, one row, or one column.
        summed = x + self.narrow(scaled) + x[:, :1] * 2.0 + x[:, :, :1] + x[..., :1]
        strided = functional.gelu(self.strided(summed))
        same = self.same(strided) - strided.mean(1, keepdim=True)
        # Two convolutions behind one sum, of which one is read elsewhere as well.
        both = functional.silu(self.grouped(same)) + same
        flat = both.flatten(2).mT
        rows = torch.tanh(self.linear(flat)) + flat[..., :1]
        return summed, strided, both, rows


@pytest.mark.parametrize(
    "shape", [(1, 12, 14, 19), pytest.param((3, 12, 18, 16), marks=pytest.mark.slow)], ids=str
)
def test_results_are_those_of_eager(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Convolutions().eval(), torch.randn(shape)
    path = tvmbridge.export(module, x, tmp_path / "model.tvmb")
    report = tvmbridge.compare_export(module, x, path)
    assert report.ok, report


def _relu(y: torch.Tensor) -> torch.Tensor:
    return torch.relu(y)


def _read_twice(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The bias is added in the loops of the convolution; its result is read twice.
    return torch.relu(y), y.flip(3)


def _permuted(y: torch.Tensor) -> torch.Tensor:
    return torch.relu(y.transpose(2, 3))


class _Followed(nn.Module):
    def __init__(self, after: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.convolution, self.after = nn.Conv2d(16, 16, 1), after

    def forward(self, x: torch.Tensor) -> object:
        return self.after(self.convolution(x))


def _functions(
    module: nn.Module, args: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return the names of the loops and of ``forward`` in a module's code."""
    names: list[str] = []
    compile_code = building.compile_code

    def noted(scheduled: object, records: object, **options: object) -> object:
        functions = scheduled.mod.functions_items()  # type: ignore[attr-defined]
        names.extend(name.name_hint for name, _ in functions if name.name_hint != "forward")
        return compile_code(scheduled, records, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(building, "compile_code", noted)
    alone_code(module, args, {}, target=None, options=CompileOptions())
    return names


@pytest.mark.parametrize(
    ("after", "fused", "others"),
    [(_relu, "product_reshape_add_relu", 0), (_read_twice, "add", 2), (_permuted, "add", 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_only_readers_of_each_element_are_fused(
    after: Callable[[torch.Tensor], object],
    fused: str,
    others: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, x = _Followed(after).eval(), torch.randn(1, 16, 8, 9)
    names = _functions(module, (x,), monkeypatch)
    products = [name for name in names if name.startswith("product")]
    assert len(products) == 1, names
    assert all(part in products[0] for part in fused.split("_")), names
    assert len(names) - 1 == others, names


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 64, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolution(x) + y)


@pytest.mark.parametrize(("side", "alone"), [(16, False), (80, True)])
def test_large_sums_have_loops_of_their_own(
    side: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (torch.randn(1, 16, side, side), torch.randn(1, 64, side, side))
    names = _functions(_Residual().eval(), args, monkeypatch)
    assert any("relu" in name and not name.startswith("product") for name in names) == alone, names


def test_dimensions_are_matched_by_their_products() -> None:
    assert matched((64, 12), [1, 64, 3, 4]) == [([0], [1]), ([1], [2, 3])]
    assert matched((2, 6, 1, 5), [12, 5]) == [([0, 1], [0]), ([3], [1])]
    assert matched((6, 4), [4, 6]) == [([0, 1], [0, 1])]
    assert matched((1,), [1, 1]) == []

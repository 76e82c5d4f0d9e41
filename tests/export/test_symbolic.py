"""Exported functions for any size, and the sizes that they refuse."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tvmbridge_runtime
from torch import nn
from torch.export import Dim

import tvmbridge
from tests.export.models import Decoder, UNet
from tests.export.programs import compile_program, runtime_environment
from tests.export.sizes import MODELS, outcome


class Wide(nn.Module):
    """A module whose intermediate values need more memory than its argument and its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, None] + x[None]).relu().cumsum(1).amax(0)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, spec = tmp_path_factory.mktemp("export") / "model.tvmb", {"x": {0: Dim("n", max=400)}}
    return tvmbridge.export(Wide().eval(), torch.randn(9, 16), path, dynamic_shapes=spec)


_MEMORY = """
import sys, numpy, tvmbridge_runtime

def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 1000000

function = tvmbridge_runtime.load(sys.argv[1])
before = megabytes()
for size in range(360, 400):
    function(numpy.ones((size, 16), numpy.float32))
print(megabytes() - before)
"""

_MEMORY_CPP = """
#include <tvmbridge_runtime.h>
#include <cstring>
#include <fstream>
#include <iostream>

long pages() {
  long all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident;
}

int main(int, char** argv) {
  tvmbridge::Function function(argv[1]);
  long before = pages();
  for (int64_t size = 360; size < 400; ++size) {
    tvm::ffi::Tensor x = tvmbridge::empty({size, 16}, DLDataType{kDLFloat, 32, 1});
    std::memset(x.data_ptr(), 0, size * 64);
    function({x});
  }
  std::cout << (pages() - before) * 4096 / 1000000;
}
"""


def _memory(*command: str) -> int:
    environment = runtime_environment()
    return int(subprocess.check_output(command, text=True, env=environment, timeout=120))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_earlier_sizes_is_returned(wide: Path) -> None:
    """Check that 40 sizes of 10 MB for each buffer need the memory of a few."""
    assert _memory(sys.executable, "-c", _MEMORY, str(wide)) < 150


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_earlier_sizes_is_returned_in_cpp(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "sizes.cpp").write_text(_MEMORY_CPP)
    compile_program(tmp_path / "sizes.cpp", tmp_path / "sizes")
    assert _memory(str(tmp_path / "sizes"), str(wide)) < 150


class Halves(nn.Module):
    """A module that needs an even length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] // 2, 2, 8).sum(1)


class Squares(nn.Module):
    """A module that branches on a size: it multiplies square matrices and adds others."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y if x.shape[0] == x.shape[1] else x + y


class Positions(nn.Module):
    """A module with values that depend on weights and on a size, but on no argument's values."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(40, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.table(torch.arange(x.shape[1]))
        mean = self.table.weight[: x.shape[1]].mean(0)
        return self.linear(x + places) * mean + torch.arange(0, x.shape[1], dtype=x.dtype).sum()


def test_values_of_weights_and_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path = Positions().eval(), tmp_path / "model.tvmb"
    spec = {"x": {1: Dim("length", max=40)}}
    tvmbridge.export(module, torch.randn(2, 9, 8), path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    # Sample shapes end at 38.
    for length in (2, 4, 9, 31, 38, 39, 40):
        x = torch.randn(2, length, 8)
        expected = module(x).detach()
        numpy.testing.assert_allclose(function(x.numpy()), expected, rtol=1e-5, atol=1e-5)


class Ends(Positions):
    """A module that does something else for a size near the end of its table."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if x.shape[1] != 39 else -y


@pytest.mark.slow
def test_sizes_near_a_bound_at_which_forward_does_something_else(tmp_path: Path) -> None:
    path, spec = tmp_path / "model.tvmb", {"x": {1: Dim("length", max=40)}}
    tvmbridge.export(Ends().eval(), torch.randn(2, 9, 8), path, dynamic_shapes=spec)
    with pytest.raises(tvmbridge_runtime.ArgumentError):
        tvmbridge_runtime.load(path)(numpy.zeros((2, 39, 8), numpy.float32))


@pytest.mark.slow
def test_any_batch_and_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Decoder().eval()
    spec = {"tokens": {0: Dim("batch", max=48), 1: Dim("length", max=64)}}
    path = tmp_path / "model.tvmb"
    tvmbridge.export(module, torch.randint(0, 50, (4, 9)), path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    assert function.inputs[0]["shape"] == ["batch", "length"]
    batch, length = function.manifest["symbols"]
    draw = random.Random(0)
    for _ in range(40):
        shape = [draw.randint(s["least"], s["most"]) for s in (batch, length)]
        tokens = torch.randint(0, 50, shape)
        with torch.no_grad():
            expected = module(tokens)
        numpy.testing.assert_allclose(function(tokens.numpy()), expected, rtol=1e-4, atol=1e-5)
    for shape in ((49, 9), (4, 65), (0, 9)):
        with pytest.raises(tvmbridge_runtime.ArgumentError, match=r"'tokens', dimension \d, "):
            function(numpy.zeros(shape, numpy.int64))


@pytest.mark.slow
def test_random_sizes_of_a_network_that_strides_three_times(tmp_path: Path) -> None:
    model, draw, path = MODELS["strided"], random.Random(0), tmp_path / "model.tvmb"
    module = model.export(path)
    for _ in range(20):
        sizes = model.drawn(draw)
        assert outcome(module, model.arguments(*sizes), path) == ("right", ""), sizes


def test_conditions_on_sizes_are_checked(tmp_path: Path) -> None:
    dims = {0: Dim("rows", max=64), 1: Dim("columns", max=64)}
    path = tmp_path / "model.tvmb"
    sample = (torch.randn(6, 8), torch.randn(6, 8))
    tvmbridge.export(Squares().eval(), sample, path, dynamic_shapes={"x": dims, "y": dims})
    function = tvmbridge_runtime.load(path)
    x = torch.randn(22, 21)
    numpy.testing.assert_allclose(function(x.numpy(), x.numpy()), x + x, rtol=1e-6)
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="rows != columns"):
        function(x[:21].numpy(), x[:21].numpy())
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="both are rows and must be equal"):
        function(x.numpy(), x[:20].numpy())


class Singles(nn.Module):
    """A module that does something else for two single rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2, y) if x.shape[0] * y.shape[0] == 1 else (x + 1, y + 1)


class Squeezed(nn.Module):
    """A module that does something else for one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0) * 2


def test_sizes_of_one_are_served_where_forward_does_the_same(tmp_path: Path) -> None:
    path, spec = tmp_path / "model.tvmb", {"x": {0: Dim("rows")}, "y": {0: Dim("others")}}
    sample = torch.randn(3, 16), torch.randn(4, 16)
    tvmbridge.export(Singles().eval(), sample, path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    for rows, others in ((1, 5), (5, 1), (7, 2)):
        x, y = torch.randn(rows, 16), torch.randn(others, 16)
        found = function(x.numpy(), y.numpy())
        assert torch.equal(torch.from_numpy(found[0]), x + 1)
        assert torch.equal(torch.from_numpy(found[1]), y + 1)
    one = numpy.zeros((1, 16), numpy.float32)
    with pytest.raises(tvmbridge_runtime.ArgumentError, match=r"rows > 1.*or.*others > 1"):
        function(one, one)
    spec = {"x": {0: Dim("rows")}}
    tvmbridge.export(Squeezed().eval(), torch.randn(3, 4), path, dynamic_shapes=spec)
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="is 1 and must be from 2"):
        tvmbridge_runtime.load(path)(numpy.zeros((1, 4), numpy.float32))


class Residual(nn.Module):
    """A convolutional network whose images are strided and pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.first(x), 3, 2, 1)
        return self.last((x + self.second(x)).mean((2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(False, marks=pytest.mark.slow), True])
def test_strided_images_of_any_size(batch: bool, tmp_path: Path) -> None:
    dims = {2: Dim("height", max=256), 3: Dim("width", max=256)}
    spec = {"x": {0: Dim("batch", max=8)} | dims if batch else dims}
    sizes = [(30, 41), (17, 64), (9, 8), (77, 20)]
    _agrees(Residual(), torch.randn(2, 3, 32, 40), spec, tmp_path, [(2 + batch, *s) for s in sizes])


@pytest.mark.parametrize("declared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_images_that_are_halved(declared: bool, tmp_path: Path) -> None:
    height, width = Dim("height", max=128), Dim("width", max=128)
    spec = {"x": {2: 2 * height, 3: 2 * width} if declared else {2: height, 3: width}}
    sizes = [(1, 32, 48), (1, 18, 6), (1, 54, 100)]
    function = _agrees(UNet(), torch.randn(1, 3, 16, 32), spec, tmp_path, sizes)
    name = "2*height" if declared else "height"
    assert function.inputs[0]["shape"][2] == name
    for shape, reason in (((1, 3, 33, 48), "a multiple of 2"), ((1, 3, 32, 500), "width, is 500")):
        with pytest.raises(tvmbridge_runtime.ArgumentError, match=reason):
            function(numpy.zeros(shape, numpy.float32))


def _agrees(
    module: nn.Module, sample: torch.Tensor, spec: Any, folder: Path, sizes: Sequence[Sequence[int]]
) -> tvmbridge_runtime.Function:
    torch.manual_seed(0)
    path = folder / "model.tvmb"
    tvmbridge.export(module.eval(), sample, path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    for batch, height, width in sizes:
        x = torch.randn(batch, 3, height, width)
        found = torch.from_numpy(function(x.numpy()))
        with torch.no_grad():
            exact = copy.deepcopy(module).double()(x.double())
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    return function


def test_rows_that_forward_halves_come_in_pairs(tmp_path: Path) -> None:
    path, spec = tmp_path / "model.tvmb", {"x": {0: Dim("rows", max=64)}}
    module = Halves().eval()
    tvmbridge.export(module, torch.randn(6, 8), path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    for rows in (4, 10, 64):
        x = torch.randn(rows, 8)
        numpy.testing.assert_allclose(function(x.numpy()), module(x), rtol=1e-6)
    for rows, reason in ((5, "must be a multiple of 2"), (66, "must be from")):
        with pytest.raises(tvmbridge_runtime.ArgumentError, match=f"rows, is {rows} and {reason}"):
            function(numpy.zeros((rows, 8), numpy.float32))


class Six(nn.Module):
    """A module that demands six rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(6, 8) * 2


def test_what_sizes_must_fulfil_is_refused_at_export(tmp_path: Path) -> None:
    spec = {"x": {0: Dim("rows", max=64)}}
    with pytest.raises(tvmbridge.BridgeError, match=r"forward demands size 6.*for each of"):
        tvmbridge.export(Six().eval(), torch.randn(6, 8), tmp_path / "m", dynamic_shapes=spec)
    batch = Dim("batch", max=64)
    pair = {"x": {0: batch}, "y": {0: 2 * batch}}
    sample = torch.randn(3, 8), torch.randn(6, 8)
    with pytest.raises(tvmbridge.ExportError, match=r"made of one Dim in several ways"):
        tvmbridge.export(Paired().eval(), sample, tmp_path / "m", dynamic_shapes=pair)


class Paired(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y[::2]

"""Exported functions compute what eager PyTorch computes, or export refuses them by name."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tvmbridge_runtime
from torch import nn

import tvmbridge
from tests.export.models import (
    MLP,
    Attention,
    Convolutions,
    Counting,
    Decompositions,
    Lookup,
    Noisy,
    Pair,
    Structures,
)
from tests.thinned import thinned


def exported(module: nn.Module, sample: Any, folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    return tvmbridge.export(module.eval(), sample, folder / "model.tvmb", **options)


def of_seed(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("module", "sample"),
    thinned(
        [
            (MLP(), (of_seed((16, 64)),)),
            (Attention(causal=False), (of_seed((2, 9, 32)), torch.ones(9, 9).tril(-1).bool())),
            (Convolutions(), (of_seed((2, 3, 33, 32)),)),
            (Lookup(), (torch.arange(40).view(2, 20) % 50,)),
        ],
        2,
    ),
    ids=["mlp", "masked", "images", "lookup"],
)
def test_agrees_with_eager(module: nn.Module, sample: Any, tmp_path: Path) -> None:
    path = exported(module, sample, tmp_path)
    report = tvmbridge.compare_export(module, sample, path)
    assert report.ok, str(report)


def test_half_precision_sums_in_float32(tmp_path: Path) -> None:
    module, x = MLP().eval().half(), of_seed((16, 64)).half()
    found = tvmbridge_runtime.load(exported(module, x, tmp_path))(x.numpy())
    exact = module.float()(x.float())
    assert (torch.from_numpy(found).float() - exact).abs().max() < 4e-3 * exact.abs().max()


def test_structures_constants_and_views(tmp_path: Path) -> None:
    x, y = of_seed((3, 4)), {"other": of_seed((3, 4), 2)}
    path = exported(Structures(), (x, y), tmp_path)
    function = tvmbridge_runtime.load(path)
    assert [spec["name"] for spec in function.inputs] == ["x", "y.other"]
    given = x.numpy().copy()
    found = function(given, y["other"].numpy())
    expected = Structures()(x, y)
    assert list(found) == ["pair", "list", "nested"]
    assert type(found["pair"]).__name__ == "Pair"
    assert found["pair"]._fields == Pair._fields
    for ours, theirs in zip(found["pair"], expected["pair"], strict=True):
        numpy.testing.assert_allclose(ours, theirs, rtol=1e-6)
    numpy.testing.assert_array_equal(found["list"][1], x.t())
    assert found["list"][2:] == [None, 7]
    assert found["nested"][1] == "text"
    # Results share no memory with arguments.
    found["list"][0][:] = 0
    numpy.testing.assert_array_equal(given, x)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Decompositions(), ["aten.linalg_qr.default", "aten._linalg_eigh.default", "models.py:"]),
        (Noisy(), ["random draw aten.rand"]),
        (Counting(), ["forward writes into calls"]),
    ],
    ids=["decompositions", "draw", "write"],
)
def test_what_needs_pytorch_is_named(module: nn.Module, names: list[str], tmp_path: Path) -> None:
    with pytest.raises(tvmbridge.ExportError) as caught:
        exported(module, of_seed((3, 4)), tmp_path)
    assert all(name in str(caught.value) for name in names), str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_module_in_train_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tvmbridge.ExportError, match="train mode"):
        tvmbridge.export(MLP().train(), torch.zeros(2, 64), tmp_path / "model.tvmb")


def test_arguments_are_checked_by_name(tmp_path: Path) -> None:
    function = tvmbridge_runtime.load(exported(MLP(), torch.zeros(16, 64), tmp_path))
    right = numpy.zeros((16, 64), numpy.float32)
    for wrong, words in (
        (numpy.zeros((15, 64), numpy.float32), "'x', dimension 0 is 15"),
        (numpy.zeros((16, 64)), "'x' has dtype float64"),
        (numpy.zeros(64, numpy.float32), r"'x' has shape \[64\]"),
        ([1.0], "'x' is a list"),
    ):
        with pytest.raises(tvmbridge_runtime.ArgumentError, match=words):
            function(wrong)
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="missing arguments: x"):
        function()
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="no argument 'y'"):
        function(right, y=right)
    expected = function(right)
    # Pass the argument by name, as a tensor of PyTorch, then transposed, unaligned and read-only.
    numpy.testing.assert_array_equal(function(x=torch.zeros(16, 64)), expected)
    room = numpy.zeros(16 * 64 + 1, numpy.float32)[1:].reshape(16, 64)
    room.flags.writeable = False
    numpy.testing.assert_array_equal(function(room), expected)
    numpy.testing.assert_array_equal(function(numpy.zeros((64, 16), numpy.float32).T), expected)


def test_threads_share_a_function(tmp_path: Path) -> None:
    module = MLP().eval()
    function = tvmbridge_runtime.load(exported(module, torch.zeros(16, 64), tmp_path), threads=2)
    assert function.threads == 2
    inputs = [of_seed((16, 64), seed) for seed in range(4)]
    wrong: list[int] = []

    def call(number: int) -> None:
        expected = module(inputs[number]).detach().numpy()
        for _ in range(20):
            found = function(inputs[number].numpy())
            if not numpy.allclose(found, expected, rtol=1e-4, atol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_beside_are_safetensors(tmp_path: Path) -> None:
    module = MLP().eval()
    path = exported(module, of_seed((16, 64)), tmp_path, weights="beside")
    beside = path.with_name("model.tvmb.safetensors")
    assert tvmbridge.compare_export(module, of_seed((16, 64)), path).ok
    safetensors = pytest.importorskip("safetensors.torch")
    held = safetensors.load_file(beside)
    torch.testing.assert_close(held["second.bias"], module.second.bias.detach())
    beside.write_bytes(beside.read_bytes()[:-4])
    with pytest.raises(tvmbridge_runtime.FileError, match="is not the file of weights"):
        tvmbridge_runtime.load(path)
    beside.unlink()
    with pytest.raises(tvmbridge_runtime.FileError, match="which is not there"):
        tvmbridge_runtime.load(path)


def test_the_module_is_left_as_it_was(tmp_path: Path) -> None:
    module, x = MLP().eval(), of_seed((16, 64))
    before = {name: (p, p._version) for name, p in module.named_parameters()}
    tvmbridge.add_tvm_dispatch(module, x)
    exported(module, x, tmp_path)
    assert {name: (p, p._version) for name, p in module.named_parameters()} == before
    assert tvmbridge.compare_export(module, x, tmp_path / "model.tvmb").ok

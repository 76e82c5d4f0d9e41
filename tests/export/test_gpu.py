"""Functions exported for GPUs, which TVM's own CUDA runtime runs on a fake GPU.

``fake_cuda.c`` has libraries in place of CUDA's. Launches run the kernels on the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tvmbridge_runtime
from torch import nn
from torch.nn import functional

import tvmbridge
from tests.export.models import MLP, Attention
from tests.schedules.gpu.emulator import compile_into, host_compiler
from tests.thinned import but_slow
from tvmbridge.exporting import gpu

_LIBRARIES = {"libcuda.so.1": "-DDRIVER", "libcudart.so.13": "-DRUNTIME"}
_CODE = b"\x7fELF of tests"
_RUN = """
import ctypes, sys
import numpy
import tvmbridge_runtime
from tvmbridge_runtime.libraries import ffi

function = tvmbridge_runtime.load(sys.argv[1])
given = numpy.load(sys.argv[2])
# If there is a graph, the third call replays that of the second for other numbers.
for shift, stream in ((1, 0), (2, 16), (0, 0)):
    with ffi().use_raw_stream(ffi().device("cuda", 0), stream):
        result = function(*(numpy.roll(given[name], shift) for name in given.files))
size = result.numel() * (int(str(result.dtype)[-2:]) // 8)
open(sys.argv[3], "wb").write(ctypes.string_at(result.data_ptr(), size))
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with libraries in place of CUDA's."""
    folder = tmp_path_factory.mktemp("cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    (folder / "versions").write_text("libcudart.so.13 { global: *; };")
    for name, macro in _LIBRARIES.items():
        versions = f"-Wl,--version-script={folder}/versions" if macro == "-DRUNTIME" else "-w"
        command = ["-shared", "-fPIC", macro, "-w", versions, f"-Wl,-soname,{name}"]
        compiler = host_compiler().replace("g++", "gcc")
        built = [compiler, *command, "-o", str(folder / name), str(source), "-ldl"]
        subprocess.run(built, check=True)
    return folder


def _exported(
    module: nn.Module, sample: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Path:
    """Export a module for a GPU, and compile its kernels for the host instead."""

    def compiled(source: str, architecture: str) -> bytes:
        assert architecture == "sm_90a"
        compile_into(folder, source)
        return _CODE

    monkeypatch.setattr(gpu, "compile_source", compiled)
    target, path = "cuda -arch=sm_90", folder / "gpu.tvmb"
    return tvmbridge.export(module, sample, path, target=target, options=options)


def _run(path: Path, given: tuple[torch.Tensor, ...], fake: Path) -> bytes:
    done = _process(path, given, fake)
    assert done.returncode == 0, done.stderr[-3000:]
    return (path.parent / "result").read_bytes()


def _process(
    path: Path, given: tuple[torch.Tensor, ...], fake: Path
) -> subprocess.CompletedProcess[str]:
    folder = path.parent
    numpy.savez(folder / "given.npz", *(t.numpy() for t in given))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(fake),
        "TVMBRIDGE_FAKE_KERNELS": str(folder / "kernels.so"),
        "PYTHONPATH": str(Path(tvmbridge_runtime.__file__).parents[1]),
    }
    program = [sys.executable, "-c", _RUN, str(path), str(folder / "given.npz")]
    program.append(str(folder / "result"))
    return subprocess.run(program, capture_output=True, text=True, env=environment, check=False)


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.norm(self.convolution(x)).relu(), 2)
        return self.last(x.mean((2, 3)))


class _Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.table[places] * 2


_CASES = {
    "mlp": (MLP(), (torch.randn(16, 64),)),
    "causal": (Attention(causal=True), (torch.randn(2, 9, 32),)),
    "masked": (Attention(causal=False), (torch.randn(2, 9, 32), torch.ones(9, 9).tril(-1).bool())),
    "places": (_Places(), (torch.tensor([[0, -1, 3], [4, 2, -5]]),)),
    "images": (_Images(), (torch.randn(2, 3, 8, 8),)),
}


@pytest.mark.parametrize("as_graph", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    but_slow(
        [
            ("mlp", torch.float32),
            ("mlp", torch.float16),
            ("causal", torch.float16),
            ("masked", torch.float16),
            ("masked", torch.float32),
            ("images", torch.float32),
            ("places", torch.float32),
        ],
        ("mlp", torch.float32),
        ("mlp", torch.float16),
        ("causal", torch.float16),
        ("masked", torch.float32),
        ("places", torch.float32),
    ),
)
def test_results_on_a_fake_gpu(
    name: str,
    dtype: torch.dtype,
    as_graph: bool,
    fake_cuda: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    module, sample = _CASES[name]
    module = module.eval().to(dtype)
    given = tuple(t.to(dtype) if t.is_floating_point() else t for t in sample)
    path = _exported(module, given, tmp_path, monkeypatch, cuda_graphs=as_graph)
    with torch.no_grad():
        eager = module(*given)
        doubled = (t.double() if t.is_floating_point() else t for t in given)
        exact = module.double()(*doubled)
    found = torch.frombuffer(bytearray(_run(path, given, fake_cuda)), dtype=dtype).view(eager.shape)
    error, of_eager = (float((r.double() - exact).abs().max()) for r in (found, eager))
    assert error <= 2 * of_eager + torch.finfo(dtype).eps, (error, of_eager)


def test_an_index_beyond_a_table_stops_the_gpu(
    fake_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = _CASES["places"]
    path = _exported(module.eval().float(), given, tmp_path, monkeypatch)
    done = _process(path, (torch.tensor([[0, -1, 3], [4, 5, -5]]),), fake_cuda)
    assert done.returncode
    assert "a trap" in done.stderr


class _Sorting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values + x.topk(4, -1).values.sum()


def test_operators_without_kernels_are_named(tmp_path: Path) -> None:
    with pytest.raises(tvmbridge.ExportError, match=r"no kernels of GPUs for: .*sort.*topk.*test_"):
        tvmbridge.export(_Sorting().eval(), torch.randn(3, 8), tmp_path / "x", target="sm_90")


def test_targets_of_gpus(tmp_path: Path) -> None:
    for target in ("cuda", "cuda -arch=sm_75", {"kind": "cuda"}):
        with pytest.raises(tvmbridge.BuildError, match="names no GPU"):
            tvmbridge.export(MLP().eval(), torch.randn(16, 64), tmp_path / "x", target=target)
    options: dict[str, Any] = {"dynamic_shapes": {"x": {0: torch.export.Dim("rows")}}}
    with pytest.raises(tvmbridge.ExportError, match="fixed sizes"):
        tvmbridge.export(
            MLP().eval(), torch.randn(16, 64), tmp_path / "x", target="sm_90", **options
        )


def test_a_file_for_gpus_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _exported(MLP().eval(), torch.randn(16, 64), tmp_path, monkeypatch)
    with pytest.raises(tvmbridge_runtime.MachineError, match=r"sm_90|NVIDIA"):
        tvmbridge_runtime.load(path, gpu=99)

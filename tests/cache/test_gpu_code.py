"""GPU code on disk: compiled for a GPU that this machine lacks, kept, and loaded but never run."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.schedules.gpu.emulator import gpu_target
from tvmbridge import BuildError, CompileOptions
from tvmbridge.backends.cuda import identity, source
from tvmbridge.backends.cuda.nvrtc import nvrtc
from tvmbridge.compiler import cached_build
from tvmbridge.compiler.build import Built, Code
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.compiler.exported import exported
from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.request import CompileRequest

GPU = torch.device("cuda", 0)
# TVM's CUDA runtime links to these functions of the driver.
_DRIVER = (
    "cuDeviceGetName cuFuncSetAttribute cuGetErrorName cuGetErrorString cuLaunchKernelEx "
    "cuModuleGetFunction cuModuleLoadData cuModuleUnload cuTensorMapEncodeTiled cuDriverGetVersion"
)

_SCRIPT = """
import ctypes, hashlib, json, sys
from contextlib import nullcontext
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import torch, tvm
from torch import nn
from tests.schedules.gpu.emulator import gpu_target
from tvmbridge import CompileOptions
from tvmbridge.backends.cuda import identity
from tvmbridge.compiler import cached_build
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.compiler.exported import exported
from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.request import CompileRequest

identity._architecture = lambda device: "sm_90"
loaded = []
genuine = cached_build.module_of
cached_build.module_of = lambda library: (loaded.append(library), genuine(library))[1]
module, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).train(), torch.randn(4, 8)
options, target = CompileOptions(), gpu_target()
request = CompileRequest(module, (x,), {}, needs_grad=True, options=options)
lowered = lower_module(request, records=[], measure=lambda _: nullcontext())
build = cached_build.CachedBuild(target, options, torch.device("cuda", 0))
built = build(lowered.mod, [])
kinds = [k.kind for each in genuine(loaded[0]).imports for k in (each, *each.imports)]
cached_build.make_ready(target)
fresh = exported(build._compiled(lowered.mod, None, []).executable, linked=True)
print(json.dumps({
    "cache": built.cache,
    "kinds": kinds,
    "functions": sorted(n for n in ("forward", "backward") if built.machine[n] is not None),
    "library": hashlib.sha256(loaded[0]).hexdigest(),
    "fresh": hashlib.sha256(fresh).hexdigest(),
    "cubin": b"sm_90" in loaded[0],
}))
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Compile a stand-in for CUDA's driver library, whose functions all fail."""
    try:
        ctypes.CDLL("libcudart.so.13")
    except OSError:
        pytest.skip("no run-time library of CUDA")
    compiler = shutil.which("gcc")
    if compiler is None or (nvrtc() is None and shutil.which("nvcc") is None):
        pytest.skip("no C compiler, or none for CUDA")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    functions = (f"int {name}(void) {{ return 100; }}\n" for name in _DRIVER.split())
    source.write_text("".join(functions))
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(command, check=True)
    return library


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_process_loads_the_kernels_of_the_first(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TVMBRIDGE_CUDA_COMPILER", "")
    command = [sys.executable, "-c", _SCRIPT, str(driver)]
    found = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert (first["cache"], second["cache"]) == ("miss: nothing is kept for this graph", "hit")
    assert second["kinds"] == ["library", "cuda"]
    assert second["functions"] == ["backward", "forward"]
    assert first["library"] == second["library"] == second["fresh"]
    assert second["cubin"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make PyTorch answer as on a machine with a GPU."""
    answer = SimpleNamespace(major=9, minor=0, gcnArchName="gfx90a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: answer)


def _entry() -> str:
    return CachedBuild(gpu_target(), CompileOptions(), GPU).key({}).entries["device"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["_architecture", "_driver_version", "_compiler", "_libraries"])
def test_what_kernels_depend_on_is_in_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _entry()
    assert json.loads(before)["architecture"] == "sm_90"
    monkeypatch.setattr(identity, name, lambda *_: "other")
    assert _entry() != before


@pytest.mark.usefixtures("gpu")
def test_variables_are_in_the_key_but_for_those_that_ranks_differ_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _entry()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert _entry() == before
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    changed = _entry()
    assert changed != before
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert _entry() not in (before, changed)


@pytest.mark.usefixtures("gpu")
def test_the_build_of_a_module_on_a_gpu_asks_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the cache look-up; a placeholder replaces the module, whose runtime is not loaded."""
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "compile_source", lambda text, arch: text.encode())
    monkeypatch.setattr(cached_build, "module_of", lambda library: library)
    monkeypatch.setattr(cached_build, "load_code", _built)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    options, x = CompileOptions(), torch.ones(4, 8)
    lowered = lower_module(
        CompileRequest(module, (x,), {}, needs_grad=False, options=options),
        records=[],
        measure=lambda _: nullcontext(),
    )
    build = CachedBuild(gpu_target(), options, GPU)
    first, second = build(lowered.mod, []), build(lowered.mod, [])
    assert first.cache == "miss: nothing is kept for this graph"
    assert second.cache == "hit"
    assert first.machine == second.machine
    monkeypatch.setattr(identity, "_architecture", lambda _: "sm_80")
    assert build(lowered.mod, []).cache == "miss: other device"


def _built(code: Code, module: Any, target: Any, device: torch.device, cache: str) -> Built:
    assert device == GPU
    return Built(module, code.unaligned, code.shared, code.coverage, code.missing, cache)


def test_kernels_for_a_gpu_are_not_lost_without_a_linker() -> None:
    kernels = SimpleNamespace(kind="cuda", imports=[])
    host = SimpleNamespace(kind="llvm", imports=[kernels])
    executable = SimpleNamespace(mod=SimpleNamespace(kind="relax.VMExecutable", imports=[host]))
    with pytest.raises(BuildError, match="llvm, cuda"):
        exported(executable, linked=False)

"""Kernels compiled for GPUs that this machine lacks: NVIDIA's by nvcc, AMD's to code objects."""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import tirx
from tvm.tirx.build import split_host_device_mods

from benchmarks import layers
from tests.gpu.blocks import LlamaBlock
from tests.schedules.gpu.emulator import gpu_target, source_of
from tvmbridge.backends import BACKENDS
from tvmbridge.backends.cuda.nvrtc import nvrtc
from tvmbridge.backends.cuda.source import compile_source
from tvmbridge.compiler.build import COMPILER_CONFIG, fuse
from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.errors import BuildError
from tvmbridge.core.options import CompileOptions
from tvmbridge.schedules.exact_indices import with_exact_indices
from tvmbridge.schedules.gpu import schedule_for_gpu

_DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn")
_AMDGPU = 224
_GFX90A = 0x3F


def _kernels(module: nn.Module, x: torch.Tensor, target: tvm.target.Target) -> tvm.IRModule:
    """Return the scheduled functions of a module's forward and backward."""
    BACKENDS["cuda"].prepare()
    lowered = lower_module(
        CompileRequest(module, (x,), {}, needs_grad=True, options=CompileOptions()),
        records=[],
        measure=lambda _: nullcontext(),
    )
    mod = schedule_for_gpu(fuse(lowered.mod, target, []), target)
    return tvm.IRModule(
        {
            name: f.with_attr("global_symbol", name.name_hint)
            for name, f in mod.functions_items()
            if isinstance(f, tirx.PrimFunc)
        }
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler (nvcc)")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nvcc_takes_the_source_of_a_bert_layer(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CUDA_COMPILER", "nvcc")
    source, functions = source_of(_kernels(*layers.bert_training(), gpu_target()), gpu_target())
    cubin = compile_source(source, arch)
    assert cubin[:4] == b"\x7fELF"
    launched = [launch.kernel for f in functions.values() for launch in f.launches]
    assert all(name.encode() in cubin for name in launched)


@pytest.mark.skipif(nvrtc() is None, reason="no run-time compiler of CUDA (NVRTC)")
def test_nvrtc_takes_the_source() -> None:
    module, x = LlamaBlock(64, 4, 19).train().bfloat16(), torch.randn(2, 19, 64).bfloat16()
    kernels = _kernels(module, x.requires_grad_(), gpu_target())
    source, functions = source_of(kernels, gpu_target())
    cubin = compile_source(source, "sm_90")
    assert cubin[:4] == b"\x7fELF"
    launched = [launch.kernel for f in functions.values() for launch in f.launches]
    assert all(name.encode() in cubin for name in launched)
    with pytest.raises(BuildError, match="refuses the kernels"):
        compile_source("no program", "sm_90")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler (nvcc)")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvcc_takes_the_source_in_half_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CUDA_COMPILER", "nvcc")
    for module, x in (
        layers.bert_training(),
        (LlamaBlock(64, 4, 19).train(), torch.randn(2, 19, 64)),
    ):
        given = x.detach().to(dtype).requires_grad_()
        source, _ = source_of(_kernels(module.to(dtype), given, gpu_target()), gpu_target())
        assert compile_source(source, "sm_90")[:4] == b"\x7fELF"


def test_amd_code_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = shutil.which("ld.lld") or shutil.which("ld.lld-19")
    if linker is None or not _DEVICE_LIBRARIES.exists():
        pytest.skip("no ld.lld, or no device libraries of ROCm (Debian: lld-19, rocm-device-libs)")
    (tmp_path / "amdgcn").symlink_to(_DEVICE_LIBRARIES)
    (tmp_path / "ld.lld").symlink_to(linker)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    linked: list[bytes] = []
    link = tvm_ffi.get_global_func("tvm_callback_rocm_link")

    def noted(objects: bytes) -> bytes:
        linked.append(bytes(link(objects)))
        return linked[-1]

    tvm_ffi.register_global_func("tvm_callback_rocm_link", noted, override=True)
    target = tvm.target.Target({"kind": "rocm", "mcpu": "gfx90a"}, host="llvm")
    try:
        names = _code_object(_kernels(*layers.bert_training(), target), target)
    finally:
        tvm_ffi.register_global_func("tvm_callback_rocm_link", link, override=True)
    (code,) = linked
    machine, flags = struct.unpack_from("<H", code, 18)[0], struct.unpack_from("<I", code, 48)[0]
    assert code[:4] == b"\x7fELF"
    assert (machine, flags & 0xFF) == (_AMDGPU, _GFX90A)
    assert len(names) > 20
    assert all(name.encode() in code for name in names)


def _code_object(mod: tvm.IRModule, target: tvm.target.Target) -> list[str]:
    """Generate code for the kernels of a module; return their names."""
    with target, tvm.transform.PassContext(config=COMPILER_CONFIG):
        lower, _, finish = tvm.tirx.get_default_tir_pipeline(target)
        lowered = lower(tirx.transform.BindTarget(target)(with_exact_indices(mod)))
        (kernels,) = split_host_device_mods(lowered)[1].values()
        tvm_ffi.get_global_func("target.build.rocm")(finish()(kernels), target)
    return [name.name_hint for name, _ in kernels.functions_items()]

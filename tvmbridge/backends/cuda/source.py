"""Compile CUDA source to machine code, by NVRTC or nvcc."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import tvm
import tvm_ffi

from tvmbridge.backends.cuda.nvrtc import compile_by_nvrtc, nvrtc
from tvmbridge.core.errors import BuildError
from tvmbridge.kernels.callbacks import callback

NVRTC = "nvrtc"
_OPTIONS = ("-O3", "--std=c++17", "-w")


@functools.cache
def register_compiler() -> None:
    """Make TVM compile CUDA source by :func:`compile_source`; done once in a process."""
    name, compiler = "tvm_callback_cuda_compile", callback(_compile_for_tvm)
    tvm_ffi.register_global_func(name, compiler, override=True)


def _compile_for_tvm(source: str) -> bytes:
    target = tvm.target.Target.current(allow_none=True)
    arch = None if target is None else target.attrs.get("arch")
    return compile_source(source, str(arch) if arch else arch_of())


def arch_of(device: torch.device | None = None) -> str:
    """Return the architecture of an NVIDIA GPU (``sm_90``); for None, of the current GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def compile_source(source: str, arch: str) -> bytes:
    """Return a cubin of CUDA ``source`` for ``arch`` (for example ``sm_90``).

    The compiler is :func:`cuda_compiler`. If NVRTC rejects the source, perhaps because it lacks
    headers, nvcc compiles it, if installed.

    Raises:
        BuildError: there is no CUDA compiler, or it rejects the source.
    """
    compiler = cuda_compiler()
    if compiler is None:
        raise BuildError(
            "there is no CUDA compiler: put the nvcc of a CUDA toolkit on the PATH, or install "
            "NVIDIA's run-time compiler (pip install nvidia-cuda-nvrtc nvidia-cuda-runtime)"
        )
    if compiler != NVRTC:
        return _by_nvcc(compiler, source, arch)
    try:
        return compile_by_nvrtc(source, arch)
    except BuildError:
        other = shutil.which("nvcc")
        if other is None:
            raise
        return _by_nvcc(other, source, arch)


def cuda_compiler() -> str | None:
    """Return :data:`NVRTC`, the faster compiler, or else the path of nvcc; None if neither exists.

    ``TVMBRIDGE_CUDA_COMPILER=nvcc`` prefers nvcc to NVRTC.
    """
    path = shutil.which("nvcc")
    if path is not None and os.environ.get("TVMBRIDGE_CUDA_COMPILER") == "nvcc":
        return path
    return path if nvrtc() is None else NVRTC


def _by_nvcc(compiler: str, source: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tvmbridge-") as folder:
        file, out = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        file.write_text(source, encoding="utf-8")
        command = [compiler, "-cubin", f"-arch={arch}", *_OPTIONS, "-o", str(out), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"CUDA's compiler refuses the kernels: {done.stderr[:2000]}")
        return out.read_bytes()

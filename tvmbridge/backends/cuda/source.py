"""CUDA source becomes machine code."""

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
    """Let TVM compile CUDA source by :func:`compile_source`; done once in a process."""
    name, compiler = "tvm_callback_cuda_compile", callback(_compile_for_tvm)
    tvm_ffi.register_global_func(name, compiler, override=True)


def _compile_for_tvm(source: str) -> bytes:
    target = tvm.target.Target.current(allow_none=True)
    arch = None if target is None else target.attrs.get("arch")
    return compile_source(source, str(arch) if arch else arch_of())


def arch_of(device: torch.device | None = None) -> str:
    """The architecture of an NVIDIA GPU (``sm_90``); None: of the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def compile_source(source: str, arch: str) -> bytes:
    """A cubin of CUDA ``source`` for ``arch`` (``sm_90``).

    By :func:`cuda_compiler`. What NVRTC refuses, for want of headers perhaps, nvcc is given.

    Raises:
        BuildError: there is no CUDA compiler, or it refuses the source.
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
    """:data:`NVRTC`, which is the faster, or otherwise the path of nvcc; None: there is neither.

    ``TVMBRIDGE_CUDA_COMPILER=nvcc`` takes that where there is an NVRTC.
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

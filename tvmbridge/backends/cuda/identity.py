"""The part of a cache key that identifies a GPU's drivers, compilers and libraries."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tvmbridge.backends.cuda.nvrtc import nvrtc
from tvmbridge.backends.cuda.source import NVRTC, cuda_compiler
from tvmbridge.core.machine import build_stamp

# Prefixes of variables that CUDA's and AMD's compilers and libraries, or PyTorch's allocator, read.
_PREFIXES = ("CUBLAS", "CUDA_", "CUDNN", "HIP", "HSA_", "NVIDIA_", "NVRTC", "PYTORCH_", "ROC")
# Ranks of one job see different devices but share code, so these variables are left out.
_VISIBLE = "VISIBLE_DEVICES"


def gpu_identity(device: torch.device) -> str:
    """Return the cache key's entry for a GPU: its architecture, driver, compiler and libraries."""
    return json.dumps(
        {
            "architecture": _architecture(device),
            "CUDA": torch.version.cuda,
            "HIP": torch.version.hip,
            "driver": _driver_version(),
            "compiler": _compiler(),
            "cuDNN": _asked(torch.backends.cudnn.version),
            "libraries": _libraries(),
            "allocator": _asked(torch.cuda.get_allocator_backend),
            "BLAS": _asked(torch.backends.cuda.preferred_blas_library),
            "linear algebra": _asked(torch.backends.cuda.preferred_linalg_library),
            "variables": _variables(),
        },
        sort_keys=True,
    )


def _architecture(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName)
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def _driver_version() -> str:
    """Return the newest version of CUDA (or HIP) that the driver supports, or "unknown"."""
    hip = bool(torch.version.hip)
    name, function = ("libamdhip64.so", "hipDriver") if hip else ("libcuda.so.1", "cuDriver")
    version = ctypes.c_int()
    try:
        failed = getattr(ctypes.CDLL(name), f"{function}GetVersion")(ctypes.byref(version))
    except (OSError, AttributeError):
        return "unknown"
    return "unknown" if failed else str(version.value)


def _compiler() -> str:
    """Return a text that identifies the kernel compiler.

    NVRTC is identified by its version; nvcc, or ld.lld for AMD GPUs, by the build of its file.
    """
    if torch.version.hip:
        return _stamp(shutil.which("ld.lld"))
    compiler = cuda_compiler()
    return f"NVRTC {_nvrtc_version()}" if compiler == NVRTC else _stamp(compiler)


@functools.cache
def _nvrtc_version() -> str:
    library, major, minor = nvrtc(), ctypes.c_int(), ctypes.c_int()
    if library is None or library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        return "unknown"
    # Several releases of NVRTC have one version number; the stamp of the file distinguishes them.
    return f"{major.value}.{minor.value} {_stamp(library._name)}"


@functools.cache
def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    found = sorted([*folder.glob("*torch_cuda.*"), *folder.glob("*torch_hip.*")])
    return [_stamp(str(path)) for path in found]


def _stamp(path: str | None) -> str:
    try:
        return build_stamp(Path(path or "").resolve(strict=True))
    except OSError:  # A bare library name, which the system's loader resolved.
        return str(path)


def _asked(ask: Callable[[], Any]) -> str:
    try:
        return str(ask())
    except (AttributeError, RuntimeError) as error:  # This build of PyTorch has no such library.
        return type(error).__name__


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper().startswith(_PREFIXES) and _VISIBLE not in name
    }

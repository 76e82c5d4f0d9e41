"""Find a processor by its name, and describe what its code needs by the names of Linux."""

from __future__ import annotations

import platform
from difflib import get_close_matches
from typing import Any

import tvm
from tvm.target import codegen

from tvmbridge.core.errors import BuildError, ExportError
from tvmbridge.exporting.gpu import gpu_target, is_gpu
from tvmbridge.schedules.target import core_count, host_target

# From LLVM's names of instruction sets to the names in /proc/cpuinfo.
_X86 = {
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "popcnt": "popcnt",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "avx512f": "avx512f",
    "avx512cd": "avx512cd",
    "avx512bw": "avx512bw",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512ifma": "avx512ifma",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
}
_ARM = {"neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "sve": "sve", "bf16": "bf16"}


def named_target(target: Any) -> Any:
    """Return the target of a GPU, or of a processor that LLVM knows by the name ``target``.

    The architecture of a processor is this machine's. The code divides its work among as many
    cores as this process may use. A target of TVM is returned as it is.

    Raises:
        BuildError: LLVM knows no processor of this name, and TVM no such target.
        ExportError: the target is neither a CPU nor an NVIDIA GPU.
    """
    if target is None:
        return None
    host = host_target()
    gpu = gpu_target(target, _plain_host())
    if gpu is not None:
        return gpu
    known = [str(name) for name in codegen.llvm_get_cpu_archlist(host)]
    if target in known:
        return tvm.target.Target({"kind": "llvm", "mcpu": target, "num-cores": core_count(host)})
    try:
        found = tvm.target.Target(target)
    except (RuntimeError, TypeError, ValueError) as error:
        near = get_close_matches(str(target), known, 3, 0.3) or known[:3]
        raise BuildError(
            f"target {target!r} is no {platform.machine()} processor that LLVM knows: give a name, "
            f'such as {", ".join(near)}; or a dict of TVM, such as {{"kind": "llvm", "mcpu": '
            f'"{near[0]}", "num-cores": 4}}'
        ) from error
    if found.kind.name != "llvm":
        raise ExportError(
            f"code is exported for CPUs and for CUDA; target {target!r} is {found.kind.name}"
        )
    return found


def _plain_host() -> tvm.target.Target:
    """Return the target of code that launches kernels: any processor of this architecture."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return tvm.target.Target({"kind": "llvm", "mcpu": "x86-64" if is_x86 else "generic"})


def described_target(target: tvm.target.Target) -> dict[str, Any]:
    """Return the processor that code for ``target`` is for, and the instruction sets it uses."""
    if is_gpu(target):
        return {**described_target(target.host), "kind": "cuda", "gpu": str(target.attrs["arch"])}
    architecture = _architecture(target)
    known = _X86 if architecture in ("x86_64", "amd64") else _ARM
    features = [name for llvm, name in known.items() if codegen.target_has_features(llvm, target)]
    return {
        "kind": target.kind.name,
        "cpu": str(target.attrs.get("mcpu", "")),
        "architecture": architecture,
        "features": features,
        "num_cores": int(target.attrs.get("num-cores", 0) or 0),
    }


def _architecture(target: tvm.target.Target) -> str:
    triple = str(target.attrs.get("mtriple", "") or "")
    return triple.partition("-")[0].lower() if triple else platform.machine().lower()

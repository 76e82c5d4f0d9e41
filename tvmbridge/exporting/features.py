"""Describe the processor that a CPU target needs, with the names that Linux uses."""

from __future__ import annotations

import platform
from typing import Any

import tvm
from tvm.target import codegen

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


def described_target(target: tvm.target.Target) -> dict[str, Any]:
    """Return the processor that code for ``target`` is for, and the instruction sets it uses."""
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

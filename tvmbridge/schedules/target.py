"""What a CPU target offers, and the target of this machine."""

from __future__ import annotations

import os
import platform

import torch
from tvm.target import Target, codegen

# What the suite takes for this machine, as "processor:cores" (tests/machines.py).
_PRETENDED = "TVMBRIDGE_TESTED_MACHINE"
# Names for instruction sets, for a host whose processor LLVM does not know by a name that has them.
_GENERIC = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
_WIDTHS = {"AVX512": "avx512f", "AVX2": "avx2"}


def vector_bits(target: Target) -> int:
    """Return the width of a vector register of ``target``: 512, 256 or 128 bits."""
    # LLVM's own answer for the target is the widest that any processor of the architecture has.
    if codegen.target_has_features("avx512f", target):
        return 512
    return 256 if codegen.target_has_features("avx2", target) else 128


def core_count(target: Target) -> int:
    """Return the number of cores to divide work among."""
    stated = target.attrs.get("num-cores")
    return int(stated) if stated is not None else (os.cpu_count() or 1)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    pretended = os.environ.get(_PRETENDED)
    if pretended:
        return int(pretended.partition(":")[2])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_target(cores: int | None = None) -> Target:
    """Return the target of this machine, with ``cores`` cores (all that the process may use).

    LLVM names the processor by family and model, which a virtual machine may state wrongly in
    either direction; PyTorch looks at the instruction sets themselves, so its answer decides.
    """
    attributes: dict[str, object] = {"kind": "llvm", "num-cores": cores or usable_cores()}
    pretended = os.environ.get(_PRETENDED)
    if pretended:
        return Target({**attributes, "mcpu": pretended.partition(":")[0]})
    name = codegen.llvm_get_system_cpu()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return Target({**attributes, "mcpu": name})
    capability = torch.backends.cpu.get_cpu_capability()
    named = Target({**attributes, "mcpu": name})
    wanted = _WIDTHS.get(capability)
    has = {width: codegen.target_has_features(width, named) for width in _WIDTHS.values()}
    if wanted is None or (has[wanted] and not (capability == "AVX2" and has["avx512f"])):
        return named
    return Target({**attributes, "mcpu": _GENERIC[capability]})

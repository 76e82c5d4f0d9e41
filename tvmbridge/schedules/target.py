"""Query the vector width and cores of a CPU target, and find the target of this machine."""

from __future__ import annotations

import os
import platform
from functools import lru_cache

import torch
from tvm.target import Target, codegen

# Tests set this variable to a pretended machine, as "processor:cores" (tests/machines.py).
_PRETENDED = "TVMBRIDGE_TESTED_MACHINE"
# Processor names to use if LLVM's name for the host does not have the host's instruction set.
_GENERIC = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
_WIDTHS = {"AVX512": "avx512f", "AVX2": "avx2"}


@lru_cache(maxsize=16)
def vector_bits(target: Target) -> int:
    """Return the width of a vector register of ``target``: 512, 256 or 128 bits."""
    # LLVM's own vector width is the widest of any processor of the architecture.
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
    """Return the target of this machine, with ``cores`` cores; None: all that the process may use.

    LLVM finds the processor's name by family and model, which a virtual machine may report wrongly.
    PyTorch queries the instruction sets directly, so its answer takes precedence.
    """
    cores = cores or usable_cores()
    pretended = os.environ.get(_PRETENDED)
    if pretended:
        return Target({"kind": "llvm", "num-cores": cores, "mcpu": pretended.partition(":")[0]})
    name = codegen.llvm_get_system_cpu()
    capability = torch.backends.cpu.get_cpu_capability()
    return _target_named(name, capability, cores)


@lru_cache(maxsize=16)
def _target_named(name: str, capability: str, cores: int) -> Target:
    attributes: dict[str, object] = {"kind": "llvm", "num-cores": cores}
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return Target({**attributes, "mcpu": name})
    named = Target({**attributes, "mcpu": name})
    wanted = _WIDTHS.get(capability)
    has = {width: codegen.target_has_features(width, named) for width in _WIDTHS.values()}
    if wanted is None or (has[wanted] and not (capability == "AVX2" and has["avx512f"])):
        return named
    return Target({**attributes, "mcpu": _GENERIC[capability]})

"""Backends: one :class:`Backend` for each type of device that compilation supports."""

from __future__ import annotations

from typing import Any

import torch
import tvm

from tvmbridge.backends.base import Backend
from tvmbridge.backends.cpu import CPU
from tvmbridge.backends.cuda import CUDA
from tvmbridge.core.errors import BuildError, first_line

# By PyTorch's device type. PyTorch's ROCm build calls its devices "cuda" as well.
BACKENDS: dict[str, Backend] = {"cpu": CPU, "cuda": CUDA}

_CPU_DEVICE = torch.device("cpu")


def backend_for(target: tvm.target.Target) -> Backend:
    """Return the backend that compiles for ``target``."""
    return next(b for b in BACKENDS.values() if target.kind.name in b.kinds)


def backend_of(device: torch.device) -> Backend:
    """Return the backend for tensors on ``device``.

    Raises:
        BuildError: there is none for this type of device.
    """
    backend = BACKENDS.get(device.type)
    if backend is None:
        known = " or ".join(repr(name) for name in BACKENDS)
        raise BuildError(
            f"tensors on {device.type!r} are not supported; move the module to {known}"
        )
    return backend


def is_on_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` are in the host's memory."""
    backend = BACKENDS.get(device.type)
    return backend is not None and backend.on_host


def resolve_target(target: Any, device: torch.device = _CPU_DEVICE) -> tvm.target.Target:
    """Return the target to compile for: the one that the user named, or else the device's own.

    Raises:
        BuildError: TVM does not know the target, or it does not fit the tensors' device.
    """
    backend = backend_of(device)
    if target is None:
        return backend.default_target(device)
    resolved = known_target(target)
    if resolved.kind.name not in backend.kinds:
        raise BuildError(f"target {resolved} does not fit tensors on {device.type!r}")
    # A bare kind ("llvm", "cuda") has no details of the processor; the device's target has.
    is_name = isinstance(target, str) and target == resolved.kind.name
    return backend.default_target(device) if is_name else resolved


def known_target(target: Any) -> tvm.target.Target:
    """Return ``target`` as a TVM ``Target``.

    Raises:
        BuildError: TVM does not know it, or no backend compiles for it.
    """
    kinds = [kind for backend in BACKENDS.values() for kind in backend.kinds]
    try:
        resolved = tvm.target.Target(target)
    except Exception as error:
        raise BuildError(
            f"TVM does not know the target {target!r}: {first_line(error)}; use None for the "
            "device that the module is on"
        ) from error
    if resolved.kind.name not in kinds:
        raise BuildError(
            f"target {resolved.kind.name!r} is not supported; use {', '.join(kinds)}, or None for "
            "the device that the module is on"
        )
    return resolved


__all__ = [
    "BACKENDS",
    "Backend",
    "backend_for",
    "backend_of",
    "is_on_host",
    "known_target",
    "resolve_target",
]

"""Bundles of one module: one portable file with the code that its dispatch has compiled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from tvmbridge.cache.bundle import BundleError
from tvmbridge.cache.exchange import BundleReport, export_bundle, import_bundle
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.partial_backwards import PartialBackwards
from tvmbridge.dispatch import codes_of
from tvmbridge.runtime.entry import CompiledEntry


def save_compiled(module: nn.Module, path: str | Path) -> BundleReport:
    """Write the compiled code of ``module`` into one file.

    The file has native code, what capture has observed (docs/caching.md), choices of kernels and
    tuning records. It has no weights and no
    pickled objects. Loading a bundle runs its code, so share it as you would share a program.

    Args:
        module: a dispatched module, called before in each mode and at all sizes whose code is
            wanted.
        path: the file to write; an existing file is replaced.

    Returns:
        A report: the parts written, and the parts left out with the reasons.

    Raises:
        ValueError: the module is not dispatched.
        BundleError: none of its code is in the cache.
        OSError: the file cannot be written.

    Example:
        >>> add_tvm_dispatch(model, sample)  # doctest: +SKIP
        >>> print(save_compiled(model, "model.tvmbridge-bundle"))  # doctest: +SKIP
    """
    entries = list(_entries(module))
    codes = [entry.compiled for entry in entries]
    digests = {key for code in codes for key in _keys(code)}
    if not digests:
        reasons = sorted({code.cache for code in codes if not code.key}) or ["nothing is compiled"]
        raise BundleError(f"no code of this {type(module).__name__} is kept: {'; '.join(reasons)}")
    digests |= {entry.plan for entry in entries if entry.plan}
    report = export_bundle(Path(path), digests, _description(module))
    for code in codes:
        if not code.key:
            report.note("code", f"it is not kept: {code.cache}")
    return report


def load_compiled(module: nn.Module, path: str | Path) -> BundleReport:
    """Put the code of a bundle into this user's cache, where the dispatch of ``module`` finds it.

    A bundle is native code: load one only from somebody whose programs you would run. Its checksum
    is compared before any part is used. The file must belong to this user or to root, and be
    writable by nobody else.

    Args:
        module: a module of the same class, with parameters of the same names, dtypes and shapes.
        path: the file that :func:`save_compiled` wrote.

    Returns:
        A report: the parts taken over, and the parts left out with the reasons. Code that is left
        out is compiled on this machine when it is needed.

    Raises:
        BundleError: the file is damaged, belongs to another module, or the cache is turned off.
        OSError: the file cannot be read, or somebody else may have written it.

    Example:
        >>> print(load_compiled(model, "model.tvmbridge-bundle"))  # doctest: +SKIP
        >>> add_tvm_dispatch(model, sample)  # doctest: +SKIP
    """
    return import_bundle(Path(path), _description(module))


def _entries(module: nn.Module) -> Iterator[CompiledEntry]:
    for code in codes_of(module).values():
        for specialization in code.policy.specializations():
            for _, entry in specialization.compiled():
                yield entry


def _keys(code: CompiledModule) -> Iterator[str]:
    if code.key:
        yield code.key
    if isinstance(code.partial_backwards, PartialBackwards):
        yield from code.partial_backwards.keys


def _description(module: nn.Module) -> dict[str, Any]:
    """Describe the class and the tensors' names, dtypes and shapes, which a bundle must match."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    state = [(name, str(t.dtype), tuple(t.shape)) for name, t in tensors]
    return {
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters and buffers": hashlib.sha256(json.dumps(state).encode()).hexdigest(),
    }

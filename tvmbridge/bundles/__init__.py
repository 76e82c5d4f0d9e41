"""Bundles of one module: what its dispatch has compiled, in one file that travels."""

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
from tvmbridge.dispatch import dispatchers_of


def save_compiled(module: nn.Module, path: str | Path) -> BundleReport:
    """Write the code that ``module`` runs on into one file.

    The file has native code, choices of kernels and tuning records: no weights, and nothing that is
    pickled. Whoever loads it runs what it contains. Pass it on as you would pass on a program.

    Args:
        module: dispatched, and called in each mode and at all sizes whose code is wanted.
        path: the file; one that is there is replaced.

    Returns:
        What was written, and what was left out with the reasons.

    Raises:
        ValueError: the module is not dispatched.
        BundleError: none of its code is in the cache.
        OSError: the file cannot be written.

    Example:
        >>> add_tvm_dispatch(model, sample)  # doctest: +SKIP
        >>> print(save_compiled(model, "model.tvmbridge-bundle"))  # doctest: +SKIP
    """
    codes = list(_compiled(module))
    digests = {key for code in codes for key in _keys(code)}
    if not digests:
        reasons = sorted({code.cache for code in codes if not code.key}) or ["nothing is compiled"]
        raise BundleError(f"no code of this {type(module).__name__} is kept: {'; '.join(reasons)}")
    report = export_bundle(Path(path), digests, _description(module))
    for code in codes:
        if not code.key:
            report.note("code", f"it is not kept: {code.cache}")
    return report


def load_compiled(module: nn.Module, path: str | Path) -> BundleReport:
    """Put the code of a bundle into this user's cache, where the dispatch of ``module`` finds it.

    A bundle is native code. Load one only from somebody whose programs you would run. The file's
    checksums are compared before anything of it is used; it must belong to this user, or to root,
    and nobody else may have been able to write it.

    Args:
        module: of the class and with the parameters of the module that was saved.
        path: the file that :func:`save_compiled` wrote.

    Returns:
        What fits this machine, and what was left out with the reasons: it is compiled here.

    Raises:
        BundleError: the file is damaged, is of another module, or the cache is turned off.
        OSError: it cannot be read, or somebody else may have written it.

    Example:
        >>> print(load_compiled(model, "model.tvmbridge-bundle"))  # doctest: +SKIP
        >>> add_tvm_dispatch(model, sample)  # doctest: +SKIP
    """
    return import_bundle(Path(path), _description(module))


def _compiled(module: nn.Module) -> Iterator[CompiledModule]:
    for dispatcher in dispatchers_of(module).values():
        for specialization in dispatcher.all_specializations():
            for _, entry in specialization.compiled():
                yield entry.compiled


def _keys(code: CompiledModule) -> Iterator[str]:
    if code.key:
        yield code.key
    if isinstance(code.partial_backwards, PartialBackwards):
        yield from code.partial_backwards.keys


def _description(module: nn.Module) -> dict[str, Any]:
    """What two modules that share code have in common, whatever the values of their tensors."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    state = [(name, str(t.dtype), tuple(t.shape)) for name, t in tensors]
    return {
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters and buffers": hashlib.sha256(json.dumps(state).encode()).hexdigest(),
    }

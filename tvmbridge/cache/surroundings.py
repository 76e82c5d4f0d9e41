"""All entries of a cache key but the graph: versions, sources, processor, settings, variables."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import tvm
import tvm_ffi
from tvm.target import Target, codegen

from tvmbridge.cache.key import digest_of
from tvmbridge.core.kernel_settings import kernel_settings
from tvmbridge.core.machine import SWITCH, build_stamp, caching_is_off, cpu_model, threads
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.pipeline import passes_are_observed
from tvmbridge.records.folder import RECORDS, VERDICTS, WORKLOADS, Folder
from tvmbridge.records.library import log_dirs, named_log_dir
from tvmbridge.records.meta import NAME as META

_PACKAGE = Path(__file__).resolve().parents[1]
# Prefixes of variables that TVM, LLVM and the libraries of PyTorch's products may read.
_PREFIXES = ("TVM_", "LLVM_", "ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "GOMP_")
_IMPORTED = time.time()


def unusable(option: bool) -> Reason | None:
    """Return why the cache is neither read nor written; None if it is used."""
    if passes_are_observed():
        return Reason(Kind.OBSERVED)
    if not option:
        return Reason(Kind.CACHE_OFF)
    if caching_is_off():
        return Reason(Kind.CACHE_SWITCHED, os.environ[SWITCH])
    if os.environ.get("TVMBRIDGE_DUMP"):
        return Reason(Kind.DUMPED)
    if tvm.transform.PassContext.current().instruments:
        return Reason(Kind.INSTRUMENTED)
    return Reason(Kind.SOURCES) if _sources()[1] > _IMPORTED else None


def surroundings(target: Target) -> dict[str, str]:
    """Return the entries that depend on the target, the machine and this process."""
    return {
        "target": f"{target} host {target.host}",
        **machine(),
        "settings": _settings(),
        "variables": _variables(),
        "pass context": _context(),
    }


def machine() -> dict[str, str]:
    """Return the entries that depend on the machine and the installed packages alone."""
    return {
        "processor": _processor(),
        "torch": _torch(),
        "tvm": _tvm(),
        "tvmbridge": f"{_sources()[0]} Python {platform.python_version()}",
    }


def records_entry(option: str | None, used: bool, target: Target) -> str:
    """Return the entry for tuning records.

    It has the digest of the files that compilation reads, and the directory in which compilation
    lists untuned tasks.
    """
    if not used:
        return "not used"
    digests = []
    for path in log_dirs(option):
        folder = Folder.below(path, target).path
        digests += [_digest_of_file(folder / name) for name in (META, WORKLOADS, RECORDS, VERDICTS)]
    return f"{digest_of(' '.join(digests))} noted in {named_log_dir(option)}"


def _digest_of_file(path: Path) -> str:
    try:
        return digest_of(path.read_bytes())
    except OSError as error:
        return type(error).__name__


@functools.cache
def _sources() -> tuple[str, float]:
    """Return a digest of tvmbridge's own files, and the newest of their modification times.

    The version number is not enough: an editable installation changes without a new version.
    """
    root, newest = str(_PACKAGE), 0.0
    digest = hashlib.sha256()
    for path in _files_below(root, (".py", ".so", ".pyd", ".cpp", ".h")):
        with open(path, "rb") as opened:
            newest = max(newest, os.fstat(opened.fileno()).st_mtime)
            content = opened.read()
        digest.update(f"{path[len(root) :]} {len(content)} ".encode() + content)
    return digest.hexdigest(), newest


def _files_below(root: str, endings: tuple[str, ...]) -> list[str]:
    """Return the paths of files with such endings, sorted, faster than Path.rglob does."""
    walked = os.walk(root, followlinks=True)
    paths = [os.path.join(folder, name) for folder, _, names in walked for name in names]
    return sorted(path for path in paths if path.endswith(endings))


@functools.cache
def _processor() -> str:
    named = codegen.llvm_get_system_cpu()
    features = sorted(
        map(str, codegen.llvm_get_cpu_features(Target({"kind": "llvm", "mcpu": named})))
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{cpu_model()}, {named}, {capability}, {os.cpu_count()}, {digest_of(' '.join(features))}"
    )


@functools.cache
def _torch() -> str:
    folder = Path(torch.__file__).parent / "lib"
    libraries = sorted([*folder.glob("libtorch_cpu.*"), *folder.glob("torch_cpu.dll")])
    stamps = "; ".join(map(build_stamp, libraries))
    return f"{torch.__version__} {torch.version.git_version} {stamps}"


@functools.cache
def _tvm() -> str:
    folder = Path(tvm.__file__).parent
    found = map(Path, _files_below(str(folder), (".so", ".dylib", ".dll")))
    libraries = [path for path in found if "tvm" in path.name]
    stamps = "; ".join(map(build_stamp, [*libraries, Path(tvm_ffi.libinfo.find_libtvm_ffi())]))
    versions = f"{tvm.__version__} ffi {tvm_ffi.__version__} LLVM {codegen.llvm_version_major()}"
    return f"{versions} {stamps}"


def _settings() -> str:
    """Return the settings of PyTorch that affect choices of kernels or code of parallel loops."""
    backends = torch.backends
    values = {
        "threads": threads(),
        "mkldnn": backends.mkldnn.is_available(),
        "mkl": backends.mkl.is_available(),
        "openmp": backends.openmp.is_available(),
        "dtype": str(torch.get_default_dtype()),
        "platform": sys.platform,
    }
    return json.dumps({**values, **kernel_settings()})


def _variables() -> str:
    read: Mapping[str, str] = os.environ
    found = {n: v for n, v in read.items() if n.upper().startswith(_PREFIXES)}
    return json.dumps(found, sort_keys=True)


def _context() -> str:
    context = tvm.transform.PassContext.current()
    config = {str(n): str(v) for n, v in dict(context.config).items()}
    parts = (context.opt_level, sorted(map(str, context.required_pass or ())))
    return f"{parts} {sorted(map(str, context.disabled_pass or ()))} {sorted(config.items())}"

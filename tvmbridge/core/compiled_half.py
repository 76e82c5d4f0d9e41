"""Compiled halves: optional C++ extension modules that replace slower Python code of tvmbridge.

The C++ sources are part of the package. A half is compiled once, at its first use, for the
installed PyTorch, and kept in a folder of the user's cache. Without a half tvmbridge computes the
same results, but slower. :func:`states` returns which halves are missing, why, and the cost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

import torch

from tvmbridge.core.half_build import (
    HalfError,
    compile_half,
    compiler_command,
    digest_of_half,
    failure_of,
    prepare_folder,
    refuse_known_failure,
    refuse_shared,
)
from tvmbridge.core.locks import Lock
from tvmbridge.core.machine import below_home, cache_folder, caching_is_off

logger = logging.getLogger(__name__)

# "build": load a half, or compile it; "load": load what was compiled before; "off": use none.
SWITCH = "TVMBRIDGE_HALVES"
FOLDER = "TVMBRIDGE_HALVES_DIR"
_WORDS: Final = ("build", "load", "off")
_PACKAGE = Path(__file__).parents[1]
_AT_ONCE = 2  # each takes up to a gigabyte of memory


@dataclass(frozen=True)
class Half:
    """One compiled half: a C++ extension module.

    - ``name``: the full name of the module.
    - ``source``: its C++ file.
    - ``cost``: a phrase that says what is slower without it.
    """

    name: str
    source: Path
    cost: str


# In the order in which a first dispatch loads them.
HALVES: Final = {
    half.name: half
    for half in (
        Half(
            "tvmbridge.kernels._products",
            _PACKAGE / "kernels" / "_products.cpp",
            "PyTorch's kernels are called through Python, 10 to 40 microseconds more for each",
        ),
        Half(
            "tvmbridge.runtime._native",
            _PACKAGE / "runtime" / "_native.cpp",
            "each call checks its guards in Python, which takes about 5 times as long",
        ),
        Half(
            "tvmbridge.core._bernoulli",
            _PACKAGE / "core" / "_bernoulli.cpp",
            "PyTorch draws the masks of dropout, in up to 10 times the time",
        ),
    )
}


@dataclass(frozen=True)
class HalfState:
    """Whether a compiled half is available.

    - ``half``: the half.
    - ``path``: its compiled file; None if it is missing.
    - ``reason``: why it is missing; empty if it is available.
    """

    half: Half
    path: Path | None
    reason: str = ""

    def __str__(self) -> str:
        if self.path is not None:
            return f"{self.half.name}: {self.path}"
        return f"{self.half.name} is missing, because {self.reason}: {self.half.cost}"


_lock = Lock()
_loaded: dict[str, Any] = {}
_reasons: dict[str, str] = {}
_builds: dict[str, Future[Path]] | None = None
_forked = False


def compiled_half(name: str) -> Any:
    """Return the extension module of a half, or None if it is missing.

    The first call in a process starts to compile all missing halves, and waits for the requested
    one. Later calls in the process return the same result.
    """
    if name in _loaded:
        return _loaded[name]
    half = HALVES[name]
    try:
        module = _module(name, _path_of(half))
    except Exception as error:  # Python code does the same
        module = None
        _reasons[name] = str(error)
        logger.info("%s is not used: %s", name, error)
    return _loaded.setdefault(name, module)


def _path_of(half: Half) -> Path:
    """Return the compiled file of ``half``; compile it now if it is missing."""
    if word() == "off":
        raise HalfError(f"{SWITCH} is {os.environ.get(SWITCH)}")
    path = half_path(half)
    if path.is_file():
        return path
    with _lock:
        build = _started().get(half.name)
    return build.result() if build is not None else _refuse_to_build(half)


def _started() -> dict[str, Future[Path]]:
    """Return the builds (futures) by name of the half; the first call builds all missing halves."""
    global _builds
    if _builds is not None:
        return _builds
    _builds = {}
    missing = [half for half in HALVES.values() if not half_path(half).is_file()]
    with contextlib.suppress(HalfError):  # _refuse_to_build raises it again for each half
        command = _compiler_to_use()
        if not any(failure_of(half_path(half)).exists() for half in missing):
            _say_that_it_begins(missing, command[0])
        pool = ThreadPoolExecutor(_AT_ONCE, "tvmbridge-halves")
        for half in missing:
            _builds[half.name] = pool.submit(compile_half, half.source, half_path(half))
        pool.shutdown(wait=False)
    return _builds


def _say_that_it_begins(halves: list[Half], compiler: str) -> None:
    logger.warning(
        "compiling %s with %s into %s: this happens once and takes about half a minute; "
        "%s=load turns it off",
        ", ".join(half.name for half in halves),
        compiler,
        halves_folder(),
        SWITCH,
    )


def _compiler_to_use() -> list[str]:
    """Return the compiler command, if halves may be compiled in this process."""
    if word() != "build":
        raise HalfError(f"it was not compiled before, and {SWITCH} is {word()}")
    if caching_is_off() and not os.environ.get(FOLDER):
        raise HalfError("it was not compiled before, and TVMBRIDGE_CACHE is off")
    if _forked:
        raise HalfError("it was not compiled before this process was forked")
    prepare_folder(halves_folder())
    return compiler_command()


def _refuse_to_build(half: Half) -> Path:
    _compiler_to_use()
    raise HalfError(f"{half.name} was removed while the process ran")


def _after_fork() -> None:
    """Reset the state in a forked process: no compiling thread is left to release the lock."""
    global _lock, _builds, _forked
    _lock, _builds, _forked = Lock(), None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def word() -> str:
    """Return the value of ``TVMBRIDGE_HALVES``; log an unknown one once, and treat it as unset."""
    named = os.environ.get(SWITCH, "").strip().lower() or "build"
    named = {"0": "off", "1": "build"}.get(named, named)
    if named in _WORDS:
        return named
    if SWITCH not in _reasons:
        _reasons[SWITCH] = named
        logger.warning("%s is %r; choose one of %s", SWITCH, named, ", ".join(_WORDS))
    return "build"


def halves_folder() -> Path:
    """Return the folder of compiled halves: ``TVMBRIDGE_HALVES_DIR``, or the cache's ``halves``."""
    named = os.environ.get(FOLDER)
    return below_home(named) if named else cache_folder() / "halves"


def half_path(half: Half) -> Path:
    """Return the path of ``half`` for this Python, PyTorch and TVM; the file may be missing."""
    short = half.name.rpartition(".")[2]
    return halves_folder() / f"{short}-{digest_of_half(half.source)}{EXTENSION_SUFFIXES[0]}"


def build_halves() -> list[HalfState]:
    """Compile every half that is missing or cannot be loaded, even if that failed before."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_built, HALVES.values()))


def _built(half: Half) -> HalfState:
    try:
        prepare_folder(halves_folder())
        path = half_path(half)
        with contextlib.suppress(HalfError, FileNotFoundError):
            _module(half.name, path)
            return HalfState(half, path)
        path.unlink(missing_ok=True)  # a file that cannot be used
        _module(half.name, compile_half(half.source, path, again=True))
    except (OSError, RuntimeError, ValueError) as error:
        return HalfState(half, None, str(error))
    return HalfState(half, path)


def states() -> list[HalfState]:
    """Return the state of each half, without compiling or loading any."""
    return [_state(half) for half in HALVES.values()]


def missing_halves() -> list[HalfState]:
    """Return the state of each half that this process tried to load and could not."""
    return [_state(HALVES[name]) for name, module in list(_loaded.items()) if module is None]


def _state(half: Half) -> HalfState:
    if half.name in _loaded:
        module = _loaded[half.name]
        path = None if module is None else Path(module.__file__)
        return HalfState(half, path, _reasons.get(half.name, ""))
    if word() == "off":
        return HalfState(half, None, f"{SWITCH} is {os.environ.get(SWITCH)}")
    try:
        path = half_path(half)
        if path.is_file():
            refuse_shared(path)
            return HalfState(half, path)
        refuse_known_failure(path, _compiler_to_use())
        return HalfState(half, None, "nothing has used it yet, and its first use compiles it")
    except (OSError, RuntimeError, ValueError) as error:
        return HalfState(half, None, str(error))


def _module(name: str, path: Path) -> Any:
    """Load the module ``name`` from ``path``.

    Raises:
        HalfError: another user may have written the file, or it cannot be loaded.
    """
    try:
        refuse_shared(path)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise HalfError(f"{path} is no module")
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise HalfError(f"{path} cannot be loaded: {error}") from error
    if torch.__version__.split("+")[0] != module.TORCH_VERSION:
        raise HalfError(f"{path} was compiled for PyTorch {module.TORCH_VERSION}")
    return sys.modules.setdefault(name, module)

"""Find and load TVM's runtime libraries, without importing ``tvm`` or ``torch``."""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tvmbridge_runtime.errors import MachineError

_NAMES = ("libtvm_runtime.so", "libtvm_runtime_extra.so")
_lock = threading.RLock()


class _Absent(importlib.abc.MetaPathFinder):
    """Raises ImportError for ``torch``, in the thread that created this finder."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hidden = fullname in ("torch", "torch_c_dlpack_ext")
        if hidden and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is not imported by tvmbridge_runtime")
        return None


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hide PyTorch from imports, because tvm_ffi would import it, which takes seconds."""
    finder = _Absent()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@functools.cache
def ffi() -> Any:
    """Return the module ``tvm_ffi``, with TVM's runtime loaded.

    Raises:
        MachineError: a library is not installed.
    """
    with _lock:
        if "torch" in sys.modules or "tvm_ffi" in sys.modules:
            module = _imported()
        else:
            with _without_torch():
                module = _imported()
        for path in library_paths():
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        return module


def _imported() -> Any:
    try:
        import tvm_ffi
    except ImportError as error:
        raise MachineError(
            f"tvm_ffi cannot be imported ({error}): install apache-tvm-ffi"
        ) from error
    return tvm_ffi


def library_paths() -> list[Path]:
    """Return the paths of TVM's runtime libraries, beside this package or in the TVM wheel.

    Raises:
        MachineError: one of the libraries is not installed.
    """
    folders = [Path(__file__).parent / "lib"]
    spec = importlib.util.find_spec("tvm")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folders.append(Path(place) / "lib")
    for folder in folders:
        paths = [folder / name for name in _NAMES]
        if all(path.exists() for path in paths):
            return paths
    searched = ", ".join(map(str, folders))
    raise MachineError(f"{' and '.join(_NAMES)} are not in {searched}: install apache-tvm")


def tvm_version() -> str:
    """Return the version of the TVM wheel; "" if the libraries come without a wheel."""
    folder = library_paths()[0].parent.parent.parent
    found = sorted(folder.glob("apache_tvm-*.dist-info"))
    return found[-1].name.removeprefix("apache_tvm-").removesuffix(".dist-info") if found else ""

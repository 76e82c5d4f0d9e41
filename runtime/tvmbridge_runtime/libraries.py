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
from tvmbridge_runtime.locks import Lock

_NAMES = ("libtvm_runtime.so", "libtvm_runtime_extra.so")
# Modules of tvm_ffi for C++ and for PyTorch, which no call of the runtime reads.
_UNREAD = ("tvm_ffi.cpp", "tvm_ffi._optional_torch_c_dlpack")
_lock = Lock()


class _Absent(importlib.abc.MetaPathFinder):
    """Raises ImportError for ``torch`` in the thread that created this finder; delays others."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if threading.get_ident() != self._thread:
            return None
        if fullname in ("torch", "torch_c_dlpack_ext"):
            raise ModuleNotFoundError(f"{fullname} is not imported by tvmbridge_runtime")
        if fullname not in _UNREAD:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


class _Late(ModuleType):
    """A module in place of ``importlib.metadata``, which imports the real one if it is read.

    tvm_ffi reads it to find its library, and finds it without, in the folder ``lib`` beside itself.
    The real one imports the packages for mail and archives.
    """

    PackageNotFoundError = ModuleNotFoundError

    def distribution(self, name: str) -> Any:
        if name == "apache-tvm-ffi":
            raise ModuleNotFoundError(name)
        return importlib.import_module(self.__name__).distribution(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hide PyTorch from imports, because tvm_ffi would import it, which takes seconds.

    Modules that the runtime does not need are imported when somebody else reads them.
    """
    finder, name = _Absent(), "importlib.metadata"
    late = _Late(name) if name not in sys.modules else None
    sys.meta_path.insert(0, finder)
    if late is not None:
        sys.modules[name] = late
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if sys.modules.get(name) is late:
            del sys.modules[name]


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

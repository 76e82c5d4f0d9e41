"""Executables as bytes: a shared library, or LLVM bitcode if no compiler can link a library.

A library is loaded directly. Bitcode is already optimized; LLVM, which is part of TVM, compiles it
to machine code when it is loaded. That takes longer, but needs no program other than Python.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import tvm_ffi
from tvm.support.cc import get_cc

from tvmbridge.core.errors import BuildError

_BITCODE: Final = b"tvmbridge bitcode 1\n"
_LENGTH: Final = 8
_EXECUTABLE: Final = "relax.VMExecutable"


def can_link() -> bool:
    """Whether TVM finds a compiler that can link shared libraries."""
    return get_cc() is not None


def exported(executable: Any, linked: bool) -> bytes:
    """Return the executable with its constants: as a shared library if ``linked``, or as bitcode.

    Raises:
        BuildError: there is no compiler to link it, or bitcode cannot hold it: part of it, such as
            GPU code, is not LLVM's.
        RuntimeError: the compiler cannot link it.
        OSError: the folder of temporary files cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="tvmbridge-") as folder:
        if not linked:
            return _as_bitcode(executable.mod, Path(folder))
        if not can_link():
            raise BuildError("there is no C++ compiler to link it")
        path = Path(folder, "code.so")
        executable.export_library(str(path))
        return path.read_bytes()


def module_of(content: bytes) -> Any:
    """Load the module whose bytes :func:`exported` returned as ``content``.

    Each call loads from a new file. The operating system maps a file that is loaded twice only
    once, and the second module would replace the first in it.
    """
    with tempfile.TemporaryDirectory(prefix="tvmbridge-") as folder:
        if content.startswith(_BITCODE):
            return _of_bitcode(content[len(_BITCODE) :], Path(folder))
        path = Path(folder, "code.so")
        path.write_bytes(content)
        return tvm_ffi.load_module(str(path), keep_module_alive=False)


def _as_bitcode(module: Any, folder: Path) -> bytes:
    kinds = _kinds_below(module)
    if module.kind != _EXECUTABLE or kinds != ["llvm"]:
        raise BuildError(f"only a C++ compiler can link code of {', '.join(kinds) or 'no'} kind")
    module.imports[0].write_to_file(str(folder / "code.bc"), "bc")
    module.write_to_file(str(folder / "code.relax"), _EXECUTABLE)
    bitcode, executable = ((folder / f"code.{end}").read_bytes() for end in ("bc", "relax"))
    return _BITCODE + len(bitcode).to_bytes(_LENGTH, "big") + bitcode + executable


def _kinds_below(module: Any) -> list[str]:
    """Return the kinds of all modules that ``module`` imports, directly or not.

    The host's module imports the modules of GPU kernels.
    """
    return [k for each in module.imports for k in (each.kind, *_kinds_below(each))]


def _of_bitcode(content: bytes, folder: Path) -> Any:
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "big")
    code, executable = folder / "code.bc", folder / "code.relax"
    code.write_bytes(content[_LENGTH:end])
    executable.write_bytes(content[end:])
    module = _loader(_EXECUTABLE)(str(executable))
    module.import_module(_loader("ll")(str(code), "bc"))
    return module


def _loader(kind: str) -> Any:
    return tvm_ffi.get_global_func(f"ffi.Module.load_from_file.{kind}")

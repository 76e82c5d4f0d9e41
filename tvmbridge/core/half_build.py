"""Compile one half (a C++ extension module of tvmbridge) with the machine's C++ compiler."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import torch
import tvm_ffi

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.own_files import MODE, distrust, replace_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# All halves take a minute of processor time, and seven minutes were seen beside ten processes.
SECONDS: Final = 900.0
_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-w")
_LINUX: Final = ("-shared", "-Wl,--as-needed")
# Symbols of PyTorch and Python are resolved in the process that loads the half.
_MACOS: Final = ("-bundle", "-undefined", "dynamic_lookup")
_COMPILERS: Final = ("c++", "g++", "clang++")
_MOST_ERROR = 300


class HalfError(BridgeError, RuntimeError):
    """A compiled half is missing; the message says why."""


def compiler_command() -> list[str]:
    """Return the command of the C++ compiler: ``CXX``, or a compiler on the PATH.

    Raises:
        HalfError: there is no compiler, or Python's headers are missing.
    """
    if sys.platform == "win32":
        raise HalfError("it is not compiled on Windows")
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise HalfError(f"CXX is no command: {error}") from error
    for command in [named] if named else [[name] for name in _COMPILERS]:
        found = shutil.which(command[0])
        if found is not None:
            if not Path(sysconfig.get_path("include"), "Python.h").is_file():
                raise HalfError("Python's headers are missing; install python3-dev or the like")
            return [found, *command[1:]]
    what = f"CXX names {named[0]!r}, which is not there" if named else "there is no C++ compiler"
    raise HalfError(f"{what}; install g++ (apt install g++), then run `{doctor()}`")


def doctor() -> str:
    """Return the shell command that compiles the halves again."""
    return f"{Path(sys.executable).name} -m tvmbridge doctor --build"


@functools.cache
def digest_of_half(source: Path) -> str:
    """Return a digest of everything that the compiled file depends on, except the compiler.

    A compiled file therefore remains usable if the compiler is removed or updated. The code runs on
    every processor of the architecture.
    """
    parts = (
        *(p.read_text(encoding="utf-8") for p in (source, *sorted(source.parent.glob("*.h")))),
        *_FLAGS,
        f"{sys.platform} {platform.machine()} {_c_library()}",
        # sysconfig's variables are not safe to read in several threads: a read may return None.
        f"{sys.version} {EXTENSION_SUFFIXES[0]}",
        f"torch {torch.__version__} {torch.version.git_version}",
        f"tvm_ffi {tvm_ffi.__version__}",
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _c_library() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return ""


def compile_half(source: Path, path: Path, again: bool = False) -> Path:
    """Compile ``source`` into ``path`` unless another process has done so, and return ``path``.

    Args:
        again: compile even if the same compiler failed before.

    Raises:
        HalfError: the compilation failed or exceeded the time limit, or the file cannot be written.
    """
    command = compiler_command()
    try:
        with _alone(path):
            if not path.is_file():
                if not again:
                    refuse_known_failure(path, command)
                _compile(command, source, path)
    except OSError as error:
        raise HalfError(f"it cannot be written: {error}") from error
    return path


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` if it is missing.

    Raises:
        HalfError: it cannot be created, or other users may write into it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = distrust(folder.stat())
    except (OSError, RuntimeError) as error:
        raise HalfError(f"the folder for it cannot be made: {error}") from error
    if reason is not None:
        raise HalfError(f"{folder} {reason}")


def refuse_shared(path: Path) -> None:
    """Raise HalfError if another user may have written the file."""
    for each in (path.parent, path):
        reason = distrust(each.stat())
        if reason is not None:
            raise HalfError(f"{each} {reason}")


def _compile(command: list[str], source: Path, path: Path) -> None:
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    whole = [*command, *_FLAGS, *_includes(), str(source), "-o", str(new), *_linked()]
    try:
        done = subprocess.run(
            whole,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        if done.returncode == 0:
            new.chmod(MODE)
            new.replace(path)
            failure_of(path).unlink(missing_ok=True)
            return
        reason = f"{command[0]} cannot compile it: {_error_in(done.stderr)}"
        if done.returncode < 0:  # a signal ended it, such as Ctrl-C: no failure to remember
            raise HalfError(reason)
    except subprocess.TimeoutExpired:
        reason = f"{command[0]} did not end within {SECONDS:.0f} s"
    finally:
        new.unlink(missing_ok=True)
    reason += f"; `{doctor()}` tries again"
    replace_file(failure_of(path), f"{_identity(command)}\n{reason}".encode())
    raise HalfError(reason)


def _error_in(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return (lines[0] if lines else "it printed nothing")[:_MOST_ERROR]


def failure_of(path: Path) -> Path:
    """Return the file that records why ``path`` could not be compiled."""
    return path.with_suffix(".failed")


def refuse_known_failure(path: Path, command: list[str]) -> None:
    """Raise HalfError if this compiler has failed before: a failing build takes half a minute."""
    try:
        identity, _, reason = failure_of(path).read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return
    if identity == _identity(command):
        raise HalfError(reason)


def _identity(command: list[str]) -> str:
    status = Path(command[0]).resolve().stat()
    return f"{shlex.join(command)} {status.st_size} {status.st_mtime_ns}"


def _includes() -> list[str]:
    torch_headers = Path(torch.__file__).parent / "include"
    folders = [
        torch_headers,
        torch_headers / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
        tvm_ffi.libinfo.find_include_path(),
        tvm_ffi.libinfo.find_dlpack_include_path(),
    ]
    return [f"-I{folder}" for folder in folders]


def _linked() -> list[str]:
    if sys.platform == "darwin":
        return list(_MACOS)
    folders = [Path(torch.__file__).parent / "lib", Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent]
    libraries = ("c10", "torch_cpu", "torch_python", "tvm_ffi")
    return [*_LINUX, *(f"-L{folder}" for folder in folders), *(f"-l{name}" for name in libraries)]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file lock within this context, so that no other process compiles the same file."""
    with open(path.with_suffix(".lock"), "ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

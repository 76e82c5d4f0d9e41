"""Link compiled code, with a thread pool for its loops and a checksum, into a shared library."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tvm.support.cc import get_cc

from tvmbridge.core.errors import BuildError

_SOURCES = [Path(__file__).parent / name for name in ("_threads.c", "_checksums.c")]


def linked(executable: Any) -> bytes:
    """Return the bytes of a shared library with the executable, its own thread pool and a checksum.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = get_cc()
    if compiler is None:
        raise BuildError("exporting needs a C compiler to link the code: install g++ or clang")
    with tempfile.TemporaryDirectory(prefix="tvmbridge-") as folder:
        objects, path = [], Path(folder, "code.so")
        command = [compiler, "-x", "c", "-std=gnu11", "-O2", "-fPIC", "-pthread", "-c"]
        for source in _SOURCES:
            objects.append(str(Path(folder, f"{source.stem}.o")))
            run = subprocess.run(
                [*command, str(source), "-o", objects[-1]], capture_output=True, text=True
            )
            if run.returncode:
                raise BuildError(f"{compiler} cannot compile {source.name}: {run.stderr.strip()}")
        try:
            executable.export_library(str(path), addons=objects, options=["-pthread"])
        except RuntimeError as error:
            raise BuildError(f"the code cannot be linked: {error}") from error
        return path.read_bytes()

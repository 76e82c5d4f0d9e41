"""Link compiled code, with the thread pool for its loops, into a shared library."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tvm.support.cc import get_cc

from tvmbridge.core.errors import BuildError

_SOURCE = Path(__file__).parent / "_threads.c"


def linked(executable: Any) -> bytes:
    """Return the bytes of a shared library with the executable and its own thread pool.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = get_cc()
    if compiler is None:
        raise BuildError("exporting needs a C compiler to link the code: install g++ or clang")
    with tempfile.TemporaryDirectory(prefix="tvmbridge-") as folder:
        threads, path = Path(folder, "threads.o"), Path(folder, "code.so")
        command = [compiler, "-x", "c", "-std=gnu11", "-O2", "-fPIC", "-pthread", "-c"]
        run = subprocess.run(
            [*command, str(_SOURCE), "-o", str(threads)], capture_output=True, text=True
        )
        if run.returncode:
            raise BuildError(f"{compiler} cannot compile {_SOURCE.name}: {run.stderr.strip()}")
        try:
            executable.export_library(str(path), addons=[str(threads)], options=["-pthread"])
        except RuntimeError as error:
            raise BuildError(f"the code cannot be linked: {error}") from error
        return path.read_bytes()

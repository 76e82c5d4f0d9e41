"""C++ programs that load exported files, and the environment of processes of the runtime alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "runtime"


def runtime_environment() -> dict[str, str]:
    """Return the environment in which Python finds the runtime of this folder."""
    return {**os.environ, "PYTHONPATH": str(RUNTIME)}


def compile_program(source: Path, program: Path) -> None:
    """Compile a C++ file as the runtime's documentation says."""
    options = subprocess.check_output(
        [sys.executable, "-m", "tvmbridge_runtime", "--cxx"], text=True, env=runtime_environment()
    )
    command = ["g++", "-std=c++17", str(source), "-o", str(program), *shlex.split(options)]
    subprocess.run(command, check=True, timeout=120)

"""The command ``python -m tvmbridge_runtime``: options for a C++ compiler, or a file's manifest."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tvmbridge_runtime.container import read_manifest
from tvmbridge_runtime.errors import MachineError, RuntimeFileError
from tvmbridge_runtime.libraries import library_paths


def compiler_options() -> list[str]:
    """Return the options with which a C++ compiler builds a program with ``tvmbridge_runtime.h``.

    Raises:
        MachineError: TVM's wheels are not installed.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise MachineError("tvm_ffi is not installed: install apache-tvm-ffi")
    ffi, runtime = Path(spec.origin).parent, library_paths()[0].parent
    include = Path(__file__).parent / "include"
    return [
        *(f"-I{folder}" for folder in (include, ffi / "include")),
        *(f"-L{folder}" for folder in (runtime, ffi / "lib")),
        *(f"-Wl,-rpath,{folder}" for folder in (runtime, ffi / "lib")),
        # No symbol refers to TVM's virtual machine: its library registers it when it is loaded.
        "-Wl,--no-as-needed",
        "-ltvm_runtime_extra",
        "-ltvm_runtime",
        "-ltvm_ffi",
        "-ldl",
        "-pthread",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 after an error, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tvmbridge_runtime", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="an exported file to describe")
    parser.add_argument("--cxx", action="store_true", help="print options for a C++ compiler")
    options = parser.parse_args(arguments)
    try:
        if options.cxx:
            print(" ".join(compiler_options()))
        elif options.file is not None:
            print(json.dumps(read_manifest(options.file), indent=1))
        else:
            parser.error("give a file, or --cxx")
    except (RuntimeFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Install an interpreter that has a TVM with Relay: ``python -m tests.relay.install FOLDER``.

The package index has no Relay of its own, but the wheel of bitblas carries TVM 0.17. Its library is
linked against CUDA, which stubs replace. Needs Python 3.11 and a C compiler; 0.5 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "bitblas==0.0.1.dev15"
PACKAGES = ("numpy<2", "decorator", "attrs", "psutil", "scipy", "typing_extensions", "cloudpickle")
# For each library of CUDA: the symbols that are its own.
_LIBRARIES = {"libcuda.so.1": "cu[A-Z]", "libcudart.so.12": "cuda[A-Z]", "libnvrtc.so.12": "nvrtc"}


def install(folder: Path, python: str) -> Path:
    """Install into ``folder``, and return the interpreter, for TVMBRIDGE_RELAY_PYTHON."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _run(python, "-m", "venv", str(folder / "venv"))
    pip = (str(folder / "venv/bin/python"), "-m", "pip")
    _run(*pip, "install", "-q", *PACKAGES)
    _run(*pip, "download", "-q", "--no-deps", "-d", str(folder), WHEEL)
    (wheel,) = folder.glob("bitblas-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    tvm = folder / "wheel/bitblas/3rdparty/tvm"
    stub_libraries(tvm / "build/libtvm.so", folder / "stubs")
    launcher = folder / "python"
    launcher.write_text(
        "#!/bin/sh\n"
        f"LD_LIBRARY_PATH={folder}/stubs PYTHONPATH={tvm}/python TVM_LIBRARY_PATH={tvm}/build "
        f'exec {folder}/venv/bin/python "$@"\n'
    )
    launcher.chmod(0o755)
    _run(str(launcher), "-c", "from tvm import relay")
    return launcher


def stub_libraries(library: Path, folder: Path) -> None:
    """Write libraries with the symbols of CUDA that ``library`` needs; their functions fail."""
    folder.mkdir(exist_ok=True)
    listed = subprocess.check_output(["nm", "-D", "--undefined-only", str(library)], text=True)
    symbols = {line.split()[-1] for line in listed.splitlines()}
    for name, pattern in _LIBRARIES.items():
        own = sorted(s.split("@")[0] for s in symbols if re.match(pattern, s))
        source, script = folder / f"{name}.c", folder / f"{name}.map"
        source.write_text("".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in own))
        script.write_text(f"{name} {{ global: *; }};\n")
        versioned = any(s.endswith(f"@{name}") for s in symbols)
        options = [f"-Wl,--version-script={script}"] if versioned else []
        flags = ("-shared", "-fPIC", f"-Wl,-soname,{name}", *options)
        _run("cc", *flags, "-o", str(folder / name), str(source))


def _run(*command: str) -> None:
    # With packages of another interpreter on the path, pip would leave them out.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, check=True, env=environment)


def main() -> None:
    """Install, and print how to use it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="python3.11", help="an interpreter of Python 3.11")
    options = parser.parse_args()
    launcher = install(options.folder, options.python)
    print(f"export TVMBRIDGE_RELAY_PYTHON={launcher}", file=sys.stdout)


if __name__ == "__main__":
    main()

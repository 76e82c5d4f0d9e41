"""Load damaged files of exported functions, each in a process of its own, and report how it ends.

``python -m tests.export.damage --count 300 --cpp``. Each file must give an error that names it: in
Python a ``RuntimeFileError`` or an ``OSError``, in C++ exit status 1. A crash, a hang, another
exception or a result is a fault.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import tvmbridge
from tests.export.models import MLP
from tests.export.programs import RUNTIME, compile_program, runtime_environment

_LOAD = """
import sys, numpy, tvmbridge_runtime
try:
    tvmbridge_runtime.load(sys.argv[1])(numpy.ones((4, 64), numpy.float32))
except (tvmbridge_runtime.RuntimeFileError, OSError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
_Edit = Callable[[bytearray, random.Random], bytearray]


def exported(folder: Path, name: str = "model.tvmb", *, beside: bool = False) -> Path:
    """Export a small module whose argument is ``ones(4, 64)``; return the path."""
    torch.manual_seed(0)
    weights = "beside" if beside else "inside"
    return tvmbridge.export(MLP().eval(), torch.zeros(4, 64), folder / name, weights=weights)


def _flip(content: bytearray, draw: random.Random, first: int = 0, count: int = 1) -> bytearray:
    for _ in range(count):
        content[draw.randrange(first, len(content))] ^= 1 << draw.randrange(8)
    return content


def _part(content: bytearray, draw: random.Random, most: int = 4096) -> slice:
    start = draw.randrange(len(content) - 1)
    return slice(start, min(start + draw.randint(1, most), len(content)))


def _swap(content: bytearray, draw: random.Random) -> bytearray:
    place = _part(content, draw, len(content))
    content[place] = content[place][::-1]
    return content


def _fill(content: bytearray, draw: random.Random) -> bytearray:
    place = _part(content, draw)
    content[place] = bytes(draw.choice((0, 0xFF, 0x5A)) for _ in range(place.stop - place.start))
    return content


def _remove(content: bytearray, draw: random.Random) -> bytearray:
    del content[_part(content, draw)]
    return content


def _repeat(content: bytearray, draw: random.Random) -> bytearray:
    place = _part(content, draw)
    return content[: place.stop] + content[place] + content[place.stop :]


EDITS: dict[str, _Edit] = {
    "flip": _flip,
    "flip in the header": lambda c, draw: _flip(c[:64], draw) + c[64:],
    "flip in the manifest": lambda c, draw: c[:64] + _flip(c[64:4096], draw) + c[4096:],
    "many flips": lambda c, draw: _flip(c, draw, count=100),
    "many flips after the magic": lambda c, draw: _flip(c, draw, first=8, count=1000),
    "cut": lambda c, draw: c[: draw.randrange(len(c))],
    "cut near the start": lambda c, draw: c[: draw.randrange(128)],
    "fill": _fill,
    "remove": _remove,
    "repeat": _repeat,
    "reverse a part": _swap,
    "append": lambda c, draw: c + draw.randbytes(draw.randint(1, 9000)),
    "prepend": lambda c, draw: draw.randbytes(draw.randint(1, 99)) + c,
    "random bytes after the magic": lambda c, draw: c[:8] + draw.randbytes(len(c) - 8),
}


def special_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Return paths of what is no regular file, or cannot be read."""
    folder.mkdir()
    for name, make in (("FIFO", os.mkfifo), ("folder", os.mkdir)):
        make(folder / name)
        yield name, folder / name
    loop, link = folder / "loop", folder / "link"
    loop.symlink_to(loop)
    link.symlink_to(folder / "FIFO")
    yield from (("link to itself", loop), ("link to a FIFO", link))
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(folder, os.O_RDONLY)
        # The path of a socket has at most 108 bytes.
        bound.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    yield "socket", folder / "socket"
    yield from ((name, Path(name)) for name in ("/dev/null", "/dev/zero", "/proc/self/mem"))
    (folder / "empty").touch()
    yield from (("empty", folder / "empty"), ("missing", folder / "missing"))
    yield from (("path below a file", folder / "empty" / "x"), ("long name", folder / ("x" * 300)))


def edited_files(
    intact: Path, folder: Path, count: int, seed: int = 0
) -> Iterator[tuple[str, Path]]:
    """Return what is wrong and the path of ``count`` damaged copies of ``intact``."""
    draw, content = random.Random(seed), intact.read_bytes()
    for number in range(count):
        name = list(EDITS)[number % len(EDITS)]
        damaged = EDITS[name](bytearray(content), draw)
        while damaged == content:
            damaged = EDITS[name](bytearray(content), draw)
        path = folder / f"{number}.tvmb"
        path.write_bytes(damaged)
        yield f"{name} ({number})", path


def _beside(folder: Path, seed: int) -> Iterator[tuple[str, Path]]:
    """Return files whose weights beside are damaged, special or missing."""
    draw, intact = random.Random(seed), exported(folder, "beside.tvmb", beside=True)
    content = intact.with_name("beside.tvmb.safetensors").read_bytes()
    for number, (name, edit) in enumerate({**EDITS, **dict.fromkeys(("FIFO", "none"))}.items()):
        (folder / f"beside{number}").mkdir()
        path = folder / f"beside{number}" / intact.name
        shutil.copy(intact, path)
        weights = path.with_name("beside.tvmb.safetensors")
        if name == "FIFO":
            os.mkfifo(weights)
        elif edit is not None:
            damaged = edit(bytearray(content), draw)
            weights.write_bytes(damaged if damaged != content else content + b"x")
        yield f"weights beside: {name}", path


def damaged_files(folder: Path, count: int, seed: int = 0) -> Iterator[tuple[str, Path]]:
    """Return what is wrong and the path of ``count`` damaged files, and of some special ones."""
    yield from special_files(folder / "special")
    yield from _beside(folder, seed)
    yield from edited_files(exported(folder), folder, count, seed)


def _fault(command: Sequence[str], path: Path) -> str:
    """Return how the command failed to report a damaged file; an empty string if it did."""
    given = [*command, str(path)]
    try:
        done = subprocess.run(
            given, capture_output=True, text=True, env=runtime_environment(), timeout=30
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
    clear = done.returncode == 1 and "Traceback" not in done.stderr and path.name in said[0]
    return "" if clear else f"exit status {done.returncode}: {said[0]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a damaged file does not give an error that names it."""
    parser = argparse.ArgumentParser(prog="python -m tests.export.damage", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="files that are edited")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--cpp", action="store_true", help="load each file in C++, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {"Python": [sys.executable, "-c", _LOAD]}
        if options.cpp:
            compile_program(RUNTIME / "examples" / "run.cpp", folder / "run")
            commands["C++"] = [str(folder / "run")]
        (folder / "files").mkdir()
        files = list(damaged_files(folder / "files", options.count, options.seed))
        for language, command in commands.items():
            with ThreadPoolExecutor(options.workers) as pool:
                faults = list(pool.map(lambda file, c=command: _fault(c, file[1]), files))
            counts = Counter("fault" if fault else "error that names the file" for fault in faults)
            print(f"{language}: {len(files)} files, {dict(counts)}")
            for (what, _), fault in zip(files, faults, strict=True):
                if fault:
                    print(f"  {what}: {fault}")
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())

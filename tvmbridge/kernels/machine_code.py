"""Compile functions in LLVM IR with TVM's LLVM, and load them into this process."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tvm
from tvm import tirx

_KEPT: list[object] = []  # code is never unloaded, since addresses of it are in use

_ADDRESS_OF = """
define i32 @__tvm_ffi_{name}_address(ptr %self, ptr %args, i32 %n, ptr %result) {{
  store i64 1, ptr %result
  %value_at = getelementptr i8, ptr %result, i64 8
  store i64 ptrtoint (ptr @{name} to i64), ptr %value_at
  ret i32 0
}}
"""


def load_functions(source: str, names: Sequence[str]) -> list[int]:
    """Compile ``source``, text of LLVM IR, and return the addresses of its functions.

    The code stays in memory until the process ends.

    Args:
        source: definitions, without the ``target`` lines that name the machine.
    """
    text = _target_lines() + source + "".join(_ADDRESS_OF.format(name=name) for name in names)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "functions.ll"
        path.write_text(text, encoding="ascii")
        module = tvm.runtime.load_module(str(path))
    _KEPT.append(module)
    return [int(module[f"{name}_address"]()) for name in names]


@functools.cache
def _target_lines() -> str:
    """Return the ``target`` lines of LLVM IR for this machine, taken from a compiled function."""
    nothing = tirx.PrimFunc([], tirx.Evaluate(0)).with_attr("global_symbol", "nothing")
    source = tvm.tirx.build(nothing, target="llvm").inspect_source("ll")
    lines = [line for line in source.splitlines() if line.startswith("target ")]
    return "\n".join(lines) + "\n"

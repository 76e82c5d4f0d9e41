"""Texts and digests of the parts of values: constants of code, contents of cells, versions."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterable
from typing import Any

from tvmbridge.core.contents import MISSING

# Functions of these Python modules may return something else at the next call.
_VARYING = frozenset(
    {"os", "io", "time", "datetime", "random", "secrets", "uuid", "socket", "subprocess"}
    | {"pathlib", "tempfile", "shutil", "urllib", "http", "pickle", "numpy.random", "posix"}
    | {"posixpath", "ntpath", "genericpath", "glob", "linecache", "platform", "locale"}
    | {"getpass", "gc", "weakref", "shelve", "sqlite3", "resource", "signal"}
    | {"threading", "_thread", "multiprocessing", "decimal", "_decimal"}
    | {"torch.random", "torch.cuda.random"}
)


def is_filled(cell: types.CellType) -> bool:
    """Whether a cell has contents."""
    return content_of(cell) is not MISSING


def content_of(cell: types.CellType) -> Any:
    """Return the contents of a cell; MISSING for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return MISSING


def constant_text(value: Any) -> str:
    """Return a text of a constant of a code object; sets have no order of their own."""
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(constant_text, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(constant_text, value))}"
    return f"{type(value).__name__} {value!r}"


def digest_of_parts(parts: Iterable[str]) -> str:
    """Return the digest of a list of texts."""
    # Lengths keep two lists of texts from having one joined text.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


@functools.lru_cache(maxsize=1024)
def version_of(module: str) -> str:
    """Return the version of the package that ``module`` belongs to; empty if it has none."""
    package = sys.modules.get(module.partition(".")[0])
    found = vars(package).get("__version__") if package is not None else None
    return str(found or "")


def varies(module: str) -> bool:
    """Whether functions of a Python module may return something else at the next call."""
    return module in _VARYING or module.partition(".")[0] in _VARYING

"""Names of PyTorch that tvmbridge uses, and the releases that have them.

``torch_names.txt`` begins with the releases that were examined. A name stands alone if all of them
have it, and otherwise before the releases that do, or before "none". The command
``python -m tests.core.torch_names`` examines the installed release, and updates the file.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from tvmbridge.core.torch_private import table
from tvmbridge.core.torch_private.table import checks

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".txt")
RELEASE = ".".join(torch.__version__.split(".")[:2])
# Operators that tvmbridge defines, and functions that a build without CUDA lacks.
_LEFT_OUT = ("torch.ops.tvmbridge.", "torch._C._cuda_")
_PRIVATE = {name.path: name for name in table.TABLE}
Record = dict[str, frozenset[str]]


def names_used() -> set[str]:
    """Return the dotted names of PyTorch in the sources and in the table of private names."""
    trees: dict[str, ast.Module] = {}
    for folder in ("tvmbridge", "passes", "runtime/tvmbridge_runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            trees[module.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    found = {path for path in _PRIVATE if "()" not in path}
    found.update(path for paths in checks.ALTERNATIVES for path in paths)
    shared = {module: aliases(tree, {}) for module, tree in trees.items()}
    for tree in trees.values():
        found.update(names_in(tree, shared))
    return {name for name in found if not name.startswith(_LEFT_OUT)}


def names_in(tree: ast.Module, shared: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield the names of PyTorch in a file, in full.

    Args:
        shared: for each module of tvmbridge, its own short names of PyTorch's values.
    """
    short = aliases(tree, shared)
    yield from short.values()
    inner = {id(node.value) for node in _nodes(tree) if isinstance(node, ast.Attribute)}
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from _in_full(node, short)


def aliases(tree: ast.Module, shared: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the full names of PyTorch behind the names that a file imports or assigns."""
    found: dict[str, str] = {}
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            names = [a for a in node.names if a.name.split(".")[0] == "torch"]
            found.update((a.asname, a.name) if a.asname else ("torch", "torch") for a in names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for a in node.names:
                name = shared.get(node.module, {}).get(a.name)
                if node.module.split(".")[0] == "torch":
                    name = f"{node.module}.{a.name}"
                found.update({a.asname or a.name: name} if name else {})
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            full = next(_in_full(node.value, found), None)
            found.update({node.targets[0].id: full} if full else {})
    return found


@functools.cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def _in_full(node: ast.expr, short: Mapping[str, str]) -> Iterator[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if parts and isinstance(node, ast.Name) and node.id in short:
        yield ".".join([short[node.id], *reversed(parts)])


def is_here(name: str) -> bool:
    """Whether the installed release has the name; a private one must behave as expected too."""
    if name in _PRIVATE:
        return table.problem(_PRIVATE[name]) is None
    with contextlib.suppress(AttributeError):
        checks.resolve(name)
        return True
    return False


def read(text: str) -> tuple[frozenset[str], Record]:
    """Return the releases that were examined, and for each name those that have it."""
    first, *lines = text.splitlines()
    releases = frozenset(first.split()[1:])
    words = [line.split() for line in lines]
    return releases, {name: frozenset(having or releases) - {"none"} for name, *having in words}


def written(releases: Iterable[str], record: Record) -> str:
    """Return the text of the file."""
    every = frozenset(releases)
    lines = ["releases: " + " ".join(sorted(every))]
    for name, having in sorted(record.items()):
        lines.append(" ".join([name, *(sorted(having) or ["none"] if having != every else ())]))
    return "\n".join(lines) + "\n"


def lacking(used: Iterable[str], releases: frozenset[str], record: Record) -> list[str]:
    """Return a sentence for each name that a release lacks, or was not examined for.

    A name may be missing where another name stands beside it in a ``first_of`` of the table.
    """
    found = []
    for name in sorted(used):
        beside = [paths for paths in checks.ALTERNATIVES if name in paths] or [(name,)]
        having = frozenset().union(*(record.get(path, ()) for path in beside[0]))
        if missing := releases - having:
            found.append(f"{name}: not known to be in PyTorch {', '.join(sorted(missing))}")
    return found


def main() -> None:
    """Write what the installed release has into the file."""
    text = FILE.read_text(encoding="utf-8") if FILE.is_file() else "releases:\n"
    releases, before = read(text)
    record = {
        name: before.get(name, frozenset()) - {RELEASE} | ({RELEASE} if is_here(name) else set())
        for name in names_used()
    }
    releases |= {RELEASE}
    FILE.write_text(written(releases, record), encoding="utf-8")
    print(*lacking(record, releases, record), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Imports go in one direction: ``ORDER`` lists folders and top-level files from bottom to top.

A module may import from its own folder and from folders below it, but never from one above. So the
import graph of the folders has no cycle, and neither has that of the folders within a folder.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tvmbridge"

ORDER = (
    "core",
    "kernels",
    "schedules",
    "legalize",
    "records",
    "passes",
    "pipeline",
    "backends",
    "cache",
    "gradients",
    "calls",
    "graph_capture",
    "frontend",
    "differentiation",
    "coloring",
    "compiler",
    "symbolic",
    "recall",
    "runtime",
    "fx",
    "report",
    "inspect",
    "tuning",
    "exporting",
    "relay",
    "dynamo",
    "dispatch",
    "bundles",
    "distributed",
    "tvmbridge",  # the package's own __init__: the public names
    "doctor",
    "demo",
    "cli",
    "__main__",
)
RANK = {name: rank for rank, name in enumerate(ORDER)}


def module_files() -> dict[str, Path]:
    """Return the file of every module of the package, by dotted module name."""
    files = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(ROOT).with_suffix("").parts
                files[".".join(parts).removesuffix(".__init__")] = path
    return files


FILES = module_files()


@functools.cache
def parsed(name: str) -> ast.Module:
    """Return the syntax tree of a module of the package."""
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@functools.cache
def imported(name: str, *, when_loaded: bool = False) -> list[tuple[str, int]]:
    """Return the modules of the package that a module imports, with line numbers.

    Relative imports are resolved. ``when_loaded`` leaves out imports inside functions.
    """
    path = FILES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[tuple[str, int]] = []
    for node in statements(parsed(name), when_loaded):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parents = parts[: len(parts) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            inner = [f"{base}.{alias.name}" for alias in node.names]
            targets = [target if target in FILES else base for target in inner]
        else:
            continue
        found += ((t, node.lineno) for t in targets if t.split(".")[0] == "tvmbridge")
    return found


def statements(tree: ast.AST, when_loaded: bool) -> Iterator[ast.stmt]:
    """Yield the statements of a tree; without those of functions, if ``when_loaded``."""
    left = [tree]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if isinstance(node, ast.expr):
                continue
            if isinstance(node, ast.stmt):
                yield node
            if not (when_loaded and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
                left.append(node)


def unit(name: str) -> str:
    """Return the entry of ``ORDER`` that a module belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def allowed(importer: str, target: str) -> bool:
    return RANK[target] <= RANK[importer]


def test_every_module_has_a_place() -> None:
    unplaced = {unit(name) for name in FILES} - set(RANK)
    assert not unplaced, f"give them a place in the order of {Path(__file__).name}"


def test_imports_go_one_way() -> None:
    wrong = [
        f"{FILES[name].relative_to(ROOT)}:{line} imports {target}"
        for name in FILES
        for target, line in imported(name)
        if not allowed(unit(name), unit(target))
    ]
    assert not wrong


def test_no_import_goes_in_a_circle() -> None:
    graph = networkx.DiGraph()
    for name in FILES:
        graph.add_edges_from((name, target) for target, _ in imported(name, when_loaded=True))
    # A package's __init__ may import its own modules, which import each other.
    graph.remove_nodes_from([n for n in list(graph) if n in FILES and is_package(n)])
    assert list(networkx.simple_cycles(graph)) == []


def test_no_folder_within_a_folder_goes_in_a_circle() -> None:
    """The import graph within a folder has no cycle; files beside folders are nodes too."""
    graph = networkx.DiGraph()
    for name in FILES:
        for target, _ in imported(name):
            if target in FILES and inner(name) != inner(target) and unit(name) == unit(target):
                graph.add_edge(inner(name), inner(target))
    assert list(networkx.simple_cycles(graph)) == []


def inner(name: str) -> str:
    """Return the subfolder that a module belongs to; for a file beside subfolders, the module."""
    parts = name.split(".")
    below = ".".join(parts[:3])
    return below if len(parts) > 3 or is_package(below) else name


def is_package(name: str) -> bool:
    return FILES[name].name == "__init__.py"


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for name in FILES:
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


# Functions that have an operator's signature, and public functions that take options by name.
_MANY_PARAMETERS = {
    "graph_capture/trace/fast_paths.py",
    "graph_capture/trace/fused_attention.py",
    "graph_capture/trace/recurrent.py",
    "frontend/convolution.py",
    "frontend/norms.py",
    "frontend/pooling.py",
    "relay/attention.py",
    "relay/bags.py",
    "relay/convolution.py",
    "relay/norms.py",
    "dispatch.py",
    "distributed/api.py",
}
MOST_PARAMETERS = 8


def test_functions_have_few_parameters() -> None:
    many = [
        f"{name}.{node.name}: {count}"
        for name, path in FILES.items()
        if str(path.relative_to(PACKAGE)) not in _MANY_PARAMETERS
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.FunctionDef)
        and (count := len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]))
        > MOST_PARAMETERS
    ]
    assert not many


def test_passes_import_absolutely() -> None:
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "passes").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


@pytest.mark.parametrize(
    ("importer", "target", "expected"),
    [
        ("dispatch", "runtime", True),
        ("runtime", "dispatch", False),
        ("passes", "pipeline", False),
        ("inspect", "pipeline", True),
        ("inspect", "runtime", True),
        ("inspect", "dispatch", False),
        ("runtime", "inspect", False),
        ("graph_capture", "runtime", False),
        ("graph_capture", "calls", True),
        ("calls", "graph_capture", False),
        ("tvmbridge", "dispatch", True),
        ("compiler", "tvmbridge", False),
    ],
)
def test_the_rule_itself(importer: str, target: str, expected: bool) -> None:
    assert allowed(importer, target) is expected

"""Imports go one way: the table below is the order, from the bottom to the top.

Modules of one layer may import each other, but not in a circle. A module may import from its own
layer and from those below it. ``inspect`` stands aside: it reads what the lower layers make, and
only the top may use it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tvmbridge"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "admission",
            "checks",
            "custom_operator",
            "dependence",
            "errors",
            "libraries",
            "options",
            "reads",
            "structure",
            "tail",
            "turns",
            "types",
            "versions",
            "writes",
        }
    ),
    frozenset({"gradients", "kernels", "legalize", "schedules"}),
    frozenset({"records"}),
    frozenset({"passes"}),
    frozenset({"pipeline"}),
    frozenset(
        {
            "build",
            "differentiation",
            "guarding",
            "memory",
            "observing",
            "tracing",
            "cache",
            "capture",
            "coloring",
            "combining",
            "cotangents",
            "durations",
            "frontend",
            "head",
            "noise",
            "output_hooks",
            "outputs",
            "report",
            "runtime",
            "second_order",
            "siblings",
            "split",
        }
    ),
    frozenset({"compiled", "lowering"}),
    frozenset({"autograd"}),
    frozenset({"layout_guard"}),
    frozenset({"variant"}),
    frozenset({"compiler", "specialization"}),
    frozenset({"dispatcher"}),
    frozenset({"dispatch", "tuning"}),
    frozenset({"tvmbridge"}),  # the package's own __init__: the public names
    frozenset({"__main__", "cli", "demo", "doctor", "doctor_probes"}),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
INSPECT_MAY_IMPORT = RANK["dispatcher"]
MAY_IMPORT_INSPECT = RANK["dispatch"]


def module_files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    files = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(ROOT).with_suffix("").parts
                files[".".join(parts).removesuffix(".__init__")] = path
    return files


FILES = module_files()


def imported(name: str, *, when_loaded: bool = False) -> Iterator[tuple[str, int]]:
    """The modules of the package that a module imports, and the lines; relative imports resolved.

    With ``when_loaded`` only those that are imported when it is, not those inside of functions.
    """
    path = FILES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), when_loaded):
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
        yield from ((t, node.lineno) for t in targets if t.split(".")[0] == "tvmbridge")


def statements(tree: ast.AST, when_loaded: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if not (when_loaded and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield from statements(node, when_loaded)


def unit(name: str) -> str:
    """The entry of the table that a module belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def allowed(importer: str, target: str) -> bool:
    if importer == target:
        return True
    if importer == "inspect":
        return RANK[target] <= INSPECT_MAY_IMPORT
    if target == "inspect":
        return RANK[importer] >= MAY_IMPORT_INSPECT
    return RANK[target] <= RANK[importer]


def test_every_module_has_a_place() -> None:
    unplaced = {unit(name) for name in FILES} - set(RANK) - {"inspect"}
    assert not unplaced, f"give them a layer in the table of {Path(__file__).name}"


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_one_way(name: str) -> None:
    importer = unit(name)
    wrong = [
        f"{FILES[name].relative_to(ROOT)}:{line} imports {target}"
        for target, line in imported(name)
        if not allowed(importer, unit(target))
    ]
    assert not wrong


def test_no_import_goes_in_a_circle() -> None:
    graph = networkx.DiGraph()
    for name in FILES:
        graph.add_edges_from((name, target) for target, _ in imported(name, when_loaded=True))
    # A package's __init__ that imports its own modules, which import each other, is no circle.
    graph.remove_nodes_from([n for n in list(graph) if n in FILES and is_package(n)])
    assert list(networkx.simple_cycles(graph)) == []


def is_package(name: str) -> bool:
    return FILES[name].name == "__init__.py"


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
        ("versions", "errors", True),
        ("passes", "pipeline", False),
        ("inspect", "pipeline", True),
        ("inspect", "dispatcher", True),
        ("inspect", "dispatch", False),
        ("dispatch", "inspect", True),
        ("runtime", "inspect", False),
        ("tvmbridge", "dispatch", True),
        ("autograd", "tvmbridge", False),
    ],
)
def test_the_rule_itself(importer: str, target: str, expected: bool) -> None:
    assert allowed(importer, target) is expected

"""PyTorch's private names: each is in the table, behaves as expected, and is imported once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tvmbridge.core.torch_private import table
from tvmbridge.core.torch_private.table import ATTRIBUTES, REPLACED, TABLE, PrivateName, problem

ROOT = Path(__file__).parents[2]
HOME = ROOT / "tvmbridge" / "core" / "torch_private"
# The doctor runs in installations that tvmbridge refuses, so it cannot import torch_private.
EXEMPT = ("doctor/probes.py",)
PATHS = {name.path.replace("()", "") for name in TABLE}
PATCHED = {path.rpartition(".")[2] for path in PATHS}
# Private attributes of objects, and patched functions, which other files may name directly.
ATTRIBUTES_OF = {name.path.rpartition(".")[2] for name in (*ATTRIBUTES, *REPLACED)}
# Operators may begin with an underscore although they are public.
OPERATORS = ("aten", "_aten", "torch.ops")
NOT_OF_PYTORCH = {
    "os.environ._data",
    "os._exit",
    "sys._getframe",
    "sys._current_frames",
    "context._fields",  # of a named tuple
    "library._name",  # of ctypes
    "value._value",  # of threading.Semaphore
    "self._lock._is_owned",  # of threading.RLock
    "functools._lru_cache_wrapper",
    "_active_collector",
    "importlib.import_module('_abc')._get_dump",
}


@pytest.mark.parametrize("name", TABLE, ids=lambda name: name.path)
def test_pytorch_has_what_is_relied_on(name: PrivateName) -> None:
    assert problem(name) is None


def test_what_is_missing_or_different_is_named() -> None:
    gone = PrivateName("torch._C._has_no_such_name", "a test", bool)
    assert "torch._C._has_no_such_name, used for a test: AttributeError" in (problem(gone) or "")
    module = PrivateName("torch._no_such_module.name", "a test", bool)
    assert "has no attribute '_no_such_module'" in (problem(module) or "")
    other = PrivateName("torch._C._get_tracing_state", "a test", lambda ask: ask())
    assert "it does something else" in (problem(other) or "")
    signature = table.checks.takes(1, 2, 3)
    less = PrivateName("torch._prims_common.make_contiguous_strides_for", "a test", signature)
    assert "TypeError: too many positional arguments" in (problem(less) or "")


def test_no_name_is_twice_in_the_table() -> None:
    assert len({name.path for name in TABLE}) == len(TABLE)


def test_all_that_is_imported_is_in_the_table() -> None:
    tree = ast.parse((HOME / "__init__.py").read_text(encoding="utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    imported = {ast.unparse(value) for value in values}
    modules = {path for path in imported if any(p.startswith(f"{path}.") for p in PATHS)}
    assert imported - modules <= PATHS


def test_no_name_is_kept_that_nobody_uses() -> None:
    files = [path for path in (ROOT / "tvmbridge").rglob("*.py") if HOME not in path.parents]
    files += (ROOT / "passes").rglob("*.py")
    words = set(re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in files)))
    tree = ast.parse((HOME / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            imported, private = map(ast.unparse, (node.targets[0], node.value))
            assert {imported, private.rpartition(".")[2]} & words, f"{imported} is superfluous"
    for name in (*ATTRIBUTES, *REPLACED):
        last = name.path.rpartition(".")[2]
        assert {last, last.removeprefix("_global")} & words, f"{name.path} is superfluous"


def test_the_table_needs_nothing_of_tvmbridge() -> None:
    """Check that the table imports nothing of tvmbridge.

    The doctor loads the table if PyTorch lacks a name, when tvmbridge cannot be imported.
    """
    for path in (HOME / "table").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not (node.module or "").startswith("tvmbridge")


def test_private_names_are_used_through_torch_private_alone() -> None:
    found = {}
    for path in sorted([*(ROOT / "tvmbridge").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix().removeprefix("tvmbridge/")
        if not name.startswith(EXEMPT) and HOME not in path.parents:
            names = list(private_names(ast.parse(path.read_text(encoding="utf-8"))))
            found.update({name: names} if names else {})
    assert found == {}


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of PyTorch that a file uses without permission, with their lines."""
    nodes = list(ast.walk(tree))
    own = names_defined(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names if not node.level]
            found = [name for name in inner if is_private(name)]
        elif isinstance(node, ast.Attribute) and is_hidden(node.attr):
            found = [] if node.attr in own or is_allowed(node) else [ast.unparse(node)]
        elif isinstance(node, ast.Call) and _is_name(node.func, "patched_here", "getattr"):
            found = [
                argument.value
                for argument in node.args[1:2]
                if isinstance(argument, ast.Constant) and is_hidden(str(argument.value))
                if argument.value not in PATCHED | NOT_OF_PYTORCH
            ]
        else:
            continue
        yield from (f"{name}, line {node.lineno}" for name in found)


def names_defined(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names of attributes and methods that the file itself defines."""
    names = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_name(node.value, "self", "cls"):
            names.add(node.attr)
    return names - ATTRIBUTES_OF


def _is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def is_hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_private(path: str) -> bool:
    """Whether an imported path is PyTorch's and has a part that begins with an underscore."""
    first, *parts = path.split(".")
    return first == "torch" and any(map(is_hidden, parts))


def is_allowed(node: ast.Attribute) -> bool:
    owner = ast.unparse(node.value)
    if owner == "torch" or owner.startswith("torch._"):
        return False
    operator = owner in OPERATORS or owner.startswith("torch.ops.")
    return operator or ast.unparse(node) in NOT_OF_PYTORCH or node.attr in ATTRIBUTES_OF


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch._dynamo", 1),
        ("from torch._subclasses import FakeTensor", 1),
        ("from torch.utils import _pytree as pytree", 1),
        ("from tvmbridge.core.torch_private import pytree", 0),
        ("torch._C._has_storage(x)", 2),
        ("x._version + x._backward_hooks", 0),
        ("x._surely_private()", 1),
        ("aten._softmax.default, torch.ops.aten._to_copy", 0),
        ("patched_here(torch, '_check', f)", 0),
        ("patched_here(torch, '_surely_private', f)", 1),
        ("def _own(self): return other._own", 0),
    ],
)
def test_the_rule_itself(line: str, found: int) -> None:
    assert len(list(private_names(ast.parse(line)))) == found

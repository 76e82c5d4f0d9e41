"""The functions that forward runs: found by their code, with everything that they name.

A walk begins at the classes of the module. Each function that it meets and whose code forward ran
leads on to the globals, free variables and attributes that this code names. The walk is the same in
two processes if all of these are.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tvmbridge.calls.patches import code_of
from tvmbridge.core.contents import MISSING
from tvmbridge.graph_capture.observe.executed import Executed, is_library
from tvmbridge.graph_capture.observe.names import Names
from tvmbridge.recall.describe import Describer, UndescribableError

# What these Python modules and functions return may be another at the next call.
_VARYING = frozenset(
    {"os", "io", "time", "datetime", "random", "secrets", "uuid", "socket", "subprocess"}
    | {"pathlib", "tempfile", "shutil", "urllib", "http", "pickle", "numpy.random"}
)
_READ_FILES = frozenset(
    {"open", "load", "loadtxt", "genfromtxt", "fromfile", "memmap", "from_file"}
)
_SEARCHING = frozenset({"getattr", "vars", "__dict__", "globals", "locals", "eval", "exec"})


class NotFoundError(UndescribableError):
    """No name leads to a function that forward runs; ``code`` is the digest of its code."""

    def __init__(self, code: str) -> None:
        super().__init__("a function that forward runs and that no name leads to")
        self.code = code


@dataclass(frozen=True)
class Walk:
    """What a walk has met.

    - ``functions``: the functions that forward ran, in the order of ``codes``.
    - ``named``: for each name that their code uses, its place and the digest of its value.
    """

    functions: tuple[Executed, ...]
    named: Mapping[str, str]


def classes_of(module: nn.Module) -> list[type]:
    """Return the classes of the module and its submodules, each once."""
    return list(dict.fromkeys(type(each) for each in module.modules()))


def walk(module: nn.Module, describer: Describer, codes: Sequence[str]) -> Walk:
    """Find the functions whose code has one of the digests ``codes``, and describe what they name.

    Args:
        module: the module.
        describer: describes values of this module.
        codes: digests of the code that forward ran, in the order of the first runs.

    Raises:
        UndescribableError: a function was not found, or a value that it names cannot be described.
    """
    for kind in classes_of(module):
        describer.of(kind)
    wanted, done = set(codes), set[int]()
    ran: list[Executed] = []
    named: dict[str, str] = {}
    found: set[str] = set()
    while True:
        new = [
            function
            for digest in list(describer.functions)
            if digest in wanted
            for function in describer.functions[digest]
            if id(function) not in done
        ]
        if not new:
            break
        for function in new:
            done.add(id(function))
            for each in _executed(function, describer, wanted):
                ran.append(each)
                found.add(describer.code(each.code))
                named.update(_named(each, describer))
    for digest in found:
        if digest in describer.opaque:
            raise UndescribableError(describer.opaque[digest])
    if wanted - found:
        raise NotFoundError(sorted(wanted - found)[0])
    order = {digest: number for number, digest in enumerate(codes)}
    ran.sort(key=lambda each: order[describer.code(each.code)])
    return Walk(tuple(ran), named)


def _executed(
    function: types.FunctionType, describer: Describer, wanted: set[str]
) -> Iterator[Executed]:
    """Yield the function, and the wanted code objects of functions that are defined in it."""
    code = code_of(function)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    free = {n: c.cell_contents for n, c in cells if _is_filled(c)}
    yield Executed(code, function.__globals__, free)
    for inner in _within(code):
        if describer.code(inner) in wanted:
            yield Executed(inner, function.__globals__, {})


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _within(constant)


def _named(executed: Executed, describer: Describer) -> dict[str, str]:
    """Return the digests of the values that the code of a function names, by their places."""
    names, space = executed.names, executed.globals
    where = str(space.get("__name__"))
    searching = names.looked_up & _SEARCHING
    if searching & {"globals", "locals", "eval", "exec"}:
        raise UndescribableError(f"a function that calls {', '.join(sorted(searching))}")
    if "open" in names.globals:
        raise UndescribableError("a function that opens a file")
    found: dict[str, str] = {}
    values: list[tuple[str, Any]] = []
    for name in sorted(names.globals):
        value = space.get(name, vars(builtins).get(name, MISSING))
        values.append((f"{where}.{name}", value))
    for name in sorted(_imported(names, space)):
        values.append((f"import {name}", sys.modules.get(name, MISSING)))
    known = set[int]()
    while values:
        place, value = values.pop()
        if value is not MISSING or not place.startswith("import "):
            found[place] = _described(place, value, describer)
        if isinstance(value, types.ModuleType) and id(value) not in known:
            known.add(id(value))
            _refuse_varying(place, value, names)
            values += _attributes(place, value, names, bool(searching))
    return found


def _refuse_varying(place: str, module: types.ModuleType, names: Names) -> None:
    """Raise UndescribableError if code may read files, the clock or the like from ``module``."""
    top = module.__name__.partition(".")[0]
    if module.__name__ in _VARYING or top in _VARYING:
        raise UndescribableError(f"{place}, whose functions may return something else each time")
    if top in ("numpy", "torch") and names.looked_up & _READ_FILES:
        raise UndescribableError(f"{place}, from which a file may be read")


def _described(place: str, value: Any, describer: Describer) -> str:
    try:
        return describer.of(value)
    except UndescribableError as error:
        raise UndescribableError(f"{place}, which is or holds {error}") from None


def _imported(names: Names, space: Mapping[str, Any]) -> Iterable[str]:
    package = space.get("__package__")
    return {
        importlib.util.resolve_name(name, package)
        for name in names.modules
        if package or name[0] != "."
    }


def _attributes(
    place: str, module: types.ModuleType, names: Names, searching: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a Python module that the code may look up."""
    held = vars(module)
    looked_up = names.looked_up
    if searching and not is_library(module.__name__):
        looked_up |= frozenset(n for n in held if not n.startswith("__"))
    for name in sorted(looked_up & held.keys()):
        value = held[name]
        if isinstance(value, types.ModuleType) and not value.__name__.startswith(module.__name__):
            continue
        if not (name.startswith("__") and name.endswith("__")):
            yield f"{place}.{name}", value

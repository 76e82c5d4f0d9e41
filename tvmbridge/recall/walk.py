"""The functions that forward runs: found by their code, with everything that they name.

A walk begins at the classes of the module. Each function that it meets and whose code forward ran
leads on to the globals, free variables and attributes that this code names. The walk is the same in
two processes if all of these are.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tvmbridge.calls.patches import code_of
from tvmbridge.core.contents import MISSING
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.observe.executed import Executed, codes_within, is_library
from tvmbridge.graph_capture.observe.names import Names, searches
from tvmbridge.recall.describe import Describer, UndescribableError
from tvmbridge.recall.digests import is_filled, varies
from tvmbridge.recall.sets import makes_sets, names_used, order_of_sets

_READ_FILES = frozenset(
    {"open", "load", "loadtxt", "genfromtxt", "fromfile", "memmap", "from_file"}
)
_OF_FRAMES = frozenset(
    {"stack", "trace", "currentframe", "getouterframes", "getinnerframes", "getframeinfo"}
    | {"getsource", "getsourcelines", "findsource", "getfile", "getsourcefile", "getmodule"}
    | {"getcomments", "getdoc"}
)
# The results of these functions of PyTorch depend on the machine and on random generators.
_OF_MACHINE = frozenset(
    {"is_available", "device_count", "current_device", "initial_seed", "seed", "get_rng_state"}
    | {"set_rng_state", "manual_seed", "get_device_name", "get_device_properties"}
)
# The results of these functions depend on the interpreter, or on the levels of loggers.
_OF_SETTINGS = {
    "sys": frozenset(
        {"getrecursionlimit", "getswitchinterval", "getrefcount", "getallocatedblocks"}
        | {"gettrace", "getprofile", "_getframe", "exc_info", "flags", "stdin"}
    ),
    "logging": frozenset({"getLogger", "getLevelName", "root"}),
}
# Attributes of functions that no description of a function has.
_OF_FUNCTIONS = frozenset({"__doc__", "__annotations__", "cache_info", "cache_parameters"})
# Builtin functions whose results two processes, or two equal modules, do not have in common.
_OF_PROCESS = {
    "open": "opens a file",
    "hash": "calls hash",
    "id": "calls id",
    "input": "calls input",
}
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
    - ``named``: for each name that their code uses, its place and the digests of its values.
    - ``used``: names whose values their code uses for more than tests of membership; None: any.
    """

    functions: tuple[Executed, ...]
    named: Mapping[str, Collection[str]]
    used: frozenset[str] | None


def classes_of(module: nn.Module) -> list[type]:
    """Return the classes of the module and its submodules, each once."""
    return list(dict.fromkeys(type(each) for each in module.modules()))


def walk(module: nn.Module, describer: Describer, codes: Sequence[str]) -> Walk:
    """Find the functions whose code has one of the digests ``codes``, and describe what they name.

    Args:
        codes: digests of the code that forward ran, in the order of the first runs.

    Raises:
        UndescribableError: a function was not found, or a value that it names cannot be described.
    """
    for kind in classes_of(module):
        describer.of(kind)
    for node in list(pytree.SUPPORTED_NODES.values()):
        for function in flattening(node):
            describer.of(function)
    wanted, done = set(codes), set[int]()
    ran: list[Executed] = []
    named: dict[str, set[str]] = {}
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
                for place, digest in _named(each, describer).items():
                    # Two Python modules may have the same name.
                    named.setdefault(place, set()).add(digest)
    for digest in found:
        if digest in describer.opaque:
            raise UndescribableError(describer.opaque[digest])
    if wanted - found:
        raise NotFoundError(sorted(wanted - found)[0])
    order = {digest: number for number, digest in enumerate(codes)}
    ran.sort(key=lambda each: order[describer.code(each.code)])
    searching = any(map(_searching, ran))
    used = None if searching else frozenset[str]().union(*(names_used(e.code) for e in ran))
    return Walk(tuple(ran), named, used)


def flattening(node: Any) -> list[types.FunctionType]:
    """Return the functions of users by which PyTorch flattens and rebuilds objects of a class."""
    functions = (node.flatten_fn, node.unflatten_fn)
    found = [each for each in functions if isinstance(each, types.FunctionType)]
    return [each for each in found if not is_library(each.__module__)]


def _executed(
    function: types.FunctionType, describer: Describer, wanted: set[str]
) -> Iterator[Executed]:
    """Yield the function, and the wanted code objects of functions that are defined in it."""
    code = code_of(function)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    free = {n: c.cell_contents for n, c in cells.items() if is_filled(c)}
    yield Executed(code, function.__globals__, free, cells)
    for inner in codes_within(code):
        if describer.code(inner) in wanted:
            yield Executed(inner, function.__globals__, {})


def _searching(executed: Executed) -> frozenset[str]:
    """Return the functions by which the code may look up names that are no constants of its."""
    found = executed.names.looked_up & _SEARCHING
    return found if searches(executed.code) else found - {"getattr"}


def _named(executed: Executed, describer: Describer) -> dict[str, str]:
    """Return the digests of the values that the code of a function names, by their places."""
    names, space = executed.names, executed.globals
    where = str(space.get("__name__"))
    searching = _searching(executed)
    if searching & {"globals", "locals", "eval", "exec"}:
        raise UndescribableError(f"a function that calls {', '.join(sorted(searching))}")
    for name, what in _OF_PROCESS.items():
        if name in names.globals:
            raise UndescribableError(f"a function that {what}")
    for name in sorted(names.looked_up & _OF_FUNCTIONS):
        raise UndescribableError(f"a function that reads {name}")
    found: dict[str, str] = {}
    if makes_sets(executed.code):
        found[f"{where}, order of sets"] = order_of_sets()
    values: list[tuple[str, Any]] = []
    for name in sorted(names.globals):
        value = space.get(name, vars(builtins).get(name, MISSING))
        values.append((f"{where}.{name}", value))
    for name in sorted(_imported(names, space)):
        values.append((f"import {name}", sys.modules.get(name, MISSING)))
    known = set[int]()
    while values:
        place, value = values.pop()
        _refuse_varying(place, value, names)
        if value is not MISSING or not place.startswith("import "):
            found[place] = _described(place, value, describer)
        if isinstance(value, types.ModuleType) and id(value) not in known:
            known.add(id(value))
            values += _attributes(place, value, names, bool(searching))
    return found


def _refuse_varying(place: str, value: Any, names: Names) -> None:
    """Raise UndescribableError if ``value`` gives code access to files, the clock or the like."""
    is_module = isinstance(value, types.ModuleType)
    if not is_module and not callable(value):
        return
    defined = value.__name__ if is_module else getattr(value, "__module__", None)
    module = str(defined or getattr(getattr(value, "__self__", None), "__name__", ""))
    top = module.partition(".")[0]
    if module == "os" and _reads_variables_alone(value, names):
        return
    if varies(module):
        raise UndescribableError(f"{place}, whose functions may return something else each time")
    asked = names.looked_up if is_module else {getattr(value, "__name__", "")}
    if asked & _OF_SETTINGS.get(top, frozenset()):
        raise UndescribableError(f"{place}, which may be asked about a setting of the process")
    if top == "inspect" and asked & _OF_FRAMES:
        raise UndescribableError(f"{place}, which reads frames or files")
    if top not in ("numpy", "torch"):
        return
    if asked & _READ_FILES:
        raise UndescribableError(f"{place}, from which a file may be read")
    if top == "torch" and asked & _OF_MACHINE:
        raise UndescribableError(f"{place}, which may be asked about the machine or the generator")


def _reads_variables_alone(value: Any, names: Names) -> bool:
    """Whether code reads nothing of ``os`` but the environment, which guards compare as a whole."""
    if not isinstance(value, types.ModuleType):
        return value is os.getenv
    return not names.looked_up & vars(os).keys() - {"environ", "getenv", "get"}


def _described(place: str, value: Any, describer: Describer) -> str:
    try:
        return describer.named(place.rpartition(".")[2], value)
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

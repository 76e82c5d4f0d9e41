"""Names: read from a function's code object which names the function uses.

``co_names``, ``co_freevars`` and the constants give all candidates; the instructions narrow them
down. An opcode that is unknown here makes more names count as globals, never fewer.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Sequence
from types import CodeType
from typing import NamedTuple


class Names(NamedTuple):
    """The names that a code object uses, without the functions defined in it.

    - ``globals``: names of globals.
    - ``looked_up``: names that may be looked up as attributes, including ``strings``.
    - ``strings``: the string constants that are identifiers, also with dots, since ``getattr`` or
      ``import_module`` may look them up.
    - ``modules``: imported modules; a relative import begins with one dot for each level.
    - ``compared``: names that are loaded directly before a comparison (``==``, ``in``, ``is``).
    - ``identified``: names that are loaded directly before ``is``.
    - ``asks_identity``: whether ``is`` compares two values of which neither is a constant or
      reached from a global or a free variable.
    """

    globals: frozenset[str]
    looked_up: frozenset[str]
    strings: frozenset[str]
    modules: frozenset[str]
    compared: frozenset[str]
    identified: frozenset[str]
    asks_identity: bool


# Parts of the names of the opcodes that look a name up in an object or module.
_NO_GLOBAL = ("ATTR", "METHOD", "IMPORT")
# A function that uses one of these names may look up attributes by computed names.
SEARCHING = frozenset({"getattr", "vars", "__dict__"})
# Instructions that push one value, and instructions that change no value.
_PUSHES_ONE = frozenset(
    {"LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SMALL_INT"}
    | {"LOAD_FAST_CHECK", "LOAD_FAST_BORROW"}
)
_WITHOUT_EFFECT = frozenset({"EXTENDED_ARG", "PRECALL", "CACHE", "PUSH_NULL", "NOP"})
_COMPARING = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})
# Instructions that may come between a name and its comparison, such as loads of a tuple's elements.
_LOADING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_ATTR"}) | frozenset(
    {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET"}
)


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """Return the names that ``code`` uses."""
    steps = [s for s in dis.get_instructions(code) if s.opname != "EXTENDED_ARG"]
    named = [s for s in steps if s.opcode in dis.hasname]
    own = {s.argval for s in named if not any(part in s.opname for part in _NO_GLOBAL)}
    outside = own.union(code.co_names) - ({s.argval for s in named} - own)
    modules = [p for p, s in enumerate(steps) if s.opname == "IMPORT_NAME"]
    texts = (c for c in code.co_consts if isinstance(c, str))
    strings = frozenset(c for c in texts if c.replace(".", "_").isidentifier())
    before = {p: _loaded(steps[:p]) for p, s in enumerate(steps) if s.opname in _COMPARING}
    identities = [p for p in before if steps[p].opname == "IS_OP"]
    reached = outside.union(code.co_freevars)
    return Names(
        globals=frozenset(outside),
        looked_up=strings.union(code.co_names),
        strings=strings,
        modules=frozenset(_module(steps[p - 2].argval, steps[p].argval) for p in modules),
        compared=frozenset(str(s.argval) for loaded in before.values() for s in loaded),
        identified=frozenset(str(s.argval) for p in identities for s in before[p]),
        asks_identity=not all(
            steps[p - 1].opname == "LOAD_CONST"
            or any(s.argval in reached for s in before[p] if s.opname != "LOAD_ATTR")
            for p in identities
        ),
    )


@functools.lru_cache(maxsize=4096)
def searches(code: CodeType) -> bool:
    """Whether ``code`` may look up attributes by names that are none of its constants."""
    names = names_of(code)
    if not names.looked_up & SEARCHING:
        return False
    if names.looked_up & SEARCHING != {"getattr"} or "getattr" in names.strings:
        return True
    steps = [s for s in dis.get_instructions(code) if s.opname not in _WITHOUT_EFFECT]
    return any(s.argval == "getattr" and not _of_constant(steps[p:]) for p, s in enumerate(steps))


def _of_constant(steps: Sequence[dis.Instruction]) -> bool:
    """Whether ``steps`` begin with ``getattr(value, "name")``, or the same with a default.

    ``value`` is a variable or an attribute of one, and the default a variable or a constant.
    """
    getter, value, *rest = steps
    rest = list(itertools.dropwhile(lambda s: s.opname == "LOAD_ATTR", rest))
    if getter.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or value.opname not in _PUSHES_ONE:
        return False
    name, *rest = rest
    if name.opname != "LOAD_CONST" or not isinstance(name.argval, str):
        return False
    default = 1 if _pushes_one(rest[0]) else 0
    called = rest[default]
    return called.opname in ("CALL", "CALL_FUNCTION") and called.arg == 2 + default


def _pushes_one(step: dis.Instruction) -> bool:
    made = step.opname in ("BUILD_LIST", "BUILD_TUPLE", "BUILD_MAP") and step.arg == 0
    return made or step.opname in _PUSHES_ONE


@functools.lru_cache(maxsize=4096)
def asks_type(code: CodeType) -> bool:
    """Whether ``code`` uses ``type`` otherwise than as ``type(self)``."""
    steps = [s for s in dis.get_instructions(code) if s.opname.startswith("LOAD_")]
    after = [*(s.argval for s in steps[1:]), None]
    return any(
        s.argval == "type"
        and s.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
        and loaded != "self"
        for s, loaded in zip(steps, after, strict=False)
    )


@functools.lru_cache(maxsize=4096)
def asks_own_id(code: CodeType) -> bool:
    """Whether ``code`` calls ``id(self)`` or ``hash(self)``."""
    steps = [s for s in dis.get_instructions(code) if s.opname.startswith("LOAD_")]
    return any(
        s.opname == "LOAD_GLOBAL" and s.argval in ("id", "hash") and after.argval == "self"
        for s, after in itertools.pairwise(steps)
    )


@functools.lru_cache(maxsize=4096)
def compares(code: CodeType) -> bool:
    """Whether ``code`` compares by identity, equality or membership, and not with a constant."""
    steps = [s for s in dis.get_instructions(code) if s.opname != "EXTENDED_ARG"]
    return any(
        s.opname in _COMPARING
        and before.opname != "LOAD_CONST"
        and not str(s.argval).strip("=").startswith(("<", ">"))
        for before, s in itertools.pairwise(steps)
    )


def _loaded(steps: Sequence[dis.Instruction]) -> Sequence[dis.Instruction]:
    """Return the loading instructions at the end of ``steps``."""
    others = (p for p in reversed(range(len(steps))) if steps[p].opname not in _LOADING)
    return steps[next(others, -1) + 1 :]


def _module(level: object, name: object) -> str:
    return "." * (level if isinstance(level, int) else 0) + str(name)

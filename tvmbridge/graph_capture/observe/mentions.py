"""Mentions: what a function's bytecode says that it reads beside its arguments.

Globals, free variables and imported names, each with the attributes that are read of it, as
``CONFIG.scale``. Local names are followed only where they are bound by an import.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple


class Origin(enum.Enum):
    """Where the first name of a mention is looked up."""

    GLOBAL = "global"
    FREE = "free variable"
    MODULE = "module"


class Ending(enum.Enum):
    """What becomes of the value that a mention leads to."""

    USED = "it is called, passed on or computed with"
    BOUND = "an import binds a local name to it, which is followed"
    COMPARED = "it is compared with something"
    IDENTIFIED = "it is asked whether it is something"
    WRITTEN = "it is replaced"


@dataclass(frozen=True)
class Mention:
    """A name and the attributes that are read of it, one after the other.

    The name of a module may be relative, with a dot for each level.
    """

    origin: Origin
    name: str
    attributes: tuple[str, ...] = ()
    ending: Ending = Ending.USED


@dataclass(frozen=True)
class Mentions:
    """What a function mentions; ``compares_identity``: it asks whether two values are one.

    Comparisons with constants and with globals, as ``kind is None``, are not counted. ``strings``
    are its constants that could be names.
    """

    found: frozenset[Mention]
    compares_identity: bool
    strings: frozenset[str]


class _Step(NamedTuple):
    """An instruction, or one of those that a newer Python has put together."""

    opname: str
    argval: Any


_BETWEEN = frozenset(
    {"PUSH_NULL", "PRECALL", "CACHE", "NOP", "EXTENDED_ARG", "RESUME", "COPY_FREE_VARS"}
)
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
# Before an attribute is changed in place (``CONFIG.count += 1``).
_COPY = frozenset({"COPY", "DUP_TOP"})
_BOUND = frozenset({"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"})
_FROM_IMPORT = frozenset({"IMPORT_FROM", "POP_TOP", "SWAP", "ROT_TWO"})
_COMPARING = {
    "IS_OP": Ending.IDENTIFIED,
    "COMPARE_OP": Ending.COMPARED,
    "CONTAINS_OP": Ending.COMPARED,
}
# What may stand between a value and its comparison, such as the others of a tuple.
_COLLECTING = frozenset({"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", *_ATTRIBUTE, *_GLOBAL})


@functools.lru_cache(maxsize=4096)
def mentions_of(code: CodeType) -> Mentions:
    """What ``code`` mentions; functions within it are code of their own."""
    steps = [step for i in dis.get_instructions(code) for step in _steps(i)]
    found = set(_chains(code, steps))
    identity = any(
        step.opname == "IS_OP" and not _is_fixed(code, steps, place)
        for place, step in enumerate(steps)
    )
    strings = {
        c for c in code.co_consts if isinstance(c, str) and c.replace(".", "_").isidentifier()
    }
    return Mentions(frozenset(found), identity, frozenset(strings))


def _steps(instruction: dis.Instruction) -> Iterator[_Step]:
    if instruction.opname in _BETWEEN:
        return
    together = isinstance(instruction.argval, tuple) and instruction.opname.count("_FAST") == 2
    if not together:  # Otherwise it is, say, STORE_FAST_LOAD_FAST.
        yield _Step(instruction.opname, instruction.argval)
        return
    kind, *_ = instruction.opname.split("_FAST")
    second = instruction.opname.removeprefix(f"{kind}_FAST_")
    yield _Step(f"{kind}_FAST", instruction.argval[0])
    yield _Step(second, instruction.argval[1])


def _is_fixed(code: CodeType, steps: Sequence[_Step], place: int) -> bool:
    """Whether what is loaded before ``place`` is a constant, or is reached from outside."""
    for before in reversed(steps[:place]):
        if before.opname not in _ATTRIBUTE:
            free = before.opname == "LOAD_DEREF" and before.argval in code.co_freevars
            return free or before.opname == "LOAD_CONST" or before.opname in _GLOBAL
    return False


def _chains(code: CodeType, steps: Sequence[_Step]) -> Iterator[Mention]:
    aliases: dict[str, Mention] = {}
    imported: Mention | None = None
    chain: Mention | None = None
    for place, each in enumerate(steps):
        name = each.argval
        if chain is not None and each.opname in _ATTRIBUTE:
            chain = Mention(chain.origin, chain.name, (*chain.attributes, name))
            continue
        if chain is not None and each.opname in _COPY:
            continue
        if chain is not None:
            yield _ended(chain, steps, place)
            if each.opname == "STORE_FAST" and chain.origin is Origin.MODULE:
                aliases[name] = chain
        chain = None
        if each.opname in _GLOBAL:
            chain = Mention(Origin.GLOBAL, name)
        elif each.opname == "STORE_GLOBAL":
            yield Mention(Origin.GLOBAL, name, ending=Ending.WRITTEN)
        elif each.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in code.co_freevars:
            chain = Mention(Origin.FREE, name)
        elif each.opname == "IMPORT_NAME":
            imported = _imported(steps, place)
            chain = imported
        elif each.opname == "IMPORT_FROM" and imported is not None:
            chain = Mention(Origin.MODULE, imported.name, (name,))
        elif each.opname in ("LOAD_FAST", "LOAD_FAST_CHECK"):
            chain = aliases.get(name)


def _ended(chain: Mention, steps: Sequence[_Step], place: int) -> Mention:
    """``chain`` with what the step at ``place``, behind it, makes of it."""
    following = steps[place]
    if following.opname in ("STORE_ATTR", "DELETE_ATTR"):
        attributes = (*chain.attributes, following.argval)
        return Mention(chain.origin, chain.name, attributes, Ending.WRITTEN)
    if chain.origin is Origin.MODULE and following.opname in _BOUND | _FROM_IMPORT:
        return Mention(chain.origin, chain.name, chain.attributes, Ending.BOUND)
    behind = (s for s in steps[place:] if s.opname not in _COLLECTING)
    ending = _COMPARING.get(next(behind, following).opname, Ending.USED)
    return Mention(chain.origin, chain.name, chain.attributes, ending)


def _imported(steps: Sequence[_Step], place: int) -> Mention:
    """What is on the stack after the import at ``place``: a package, unless names are taken."""
    level, names = (step.argval for step in steps[place - 2 : place])
    name = str(steps[place].argval)
    if not names:
        name = name.partition(".")[0]
    return Mention(Origin.MODULE, "." * level + name)


def absolute(name: str, package: str | None) -> str:
    """The absolute name of a module that code in ``package`` imports by ``name``."""
    return importlib.util.resolve_name(name, package) if name.startswith(".") else name

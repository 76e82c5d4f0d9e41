"""Mentions: what a function's bytecode says that it reads beside its arguments.

Globals, free variables and imported names, each with the attributes that are read of it, as
``CONFIG.scale``. Local names are followed only where they are bound by an import.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType


class Origin(enum.Enum):
    """Where the first name of a mention is looked up."""

    GLOBAL = "global"
    FREE = "free variable"
    MODULE = "module"


@dataclass(frozen=True)
class Mention:
    """A name and the attributes that are read of it, one after the other.

    The name of a module may be relative, with a dot for each level.
    """

    origin: Origin
    name: str
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mentions:
    """What a function mentions; ``compares_identity``: it asks whether two values are one.

    Comparisons with constants and with globals, as ``kind is None``, are not counted.
    """

    found: frozenset[Mention]
    compares_identity: bool


_BETWEEN = frozenset(
    {"PUSH_NULL", "PRECALL", "CACHE", "NOP", "EXTENDED_ARG", "RESUME", "COPY_FREE_VARS"}
)
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})


@functools.lru_cache(maxsize=4096)
def mentions_of(code: CodeType) -> Mentions:
    """What ``code`` mentions; functions within it are code of their own."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    found = set(_chains(code, instructions))
    identity = any(
        i.opname == "IS_OP" and not _is_fixed(code, instructions, place)
        for place, i in enumerate(instructions)
    )
    return Mentions(frozenset(found), identity)


def _is_fixed(code: CodeType, instructions: list[dis.Instruction], place: int) -> bool:
    """Whether what is loaded before ``place`` is a constant, or is reached from outside."""
    for before in reversed(instructions[:place]):
        if before.opname not in _ATTRIBUTE:
            free = before.opname == "LOAD_DEREF" and before.argval in code.co_freevars
            return free or before.opname == "LOAD_CONST" or before.opname in _GLOBAL
    return False


def _chains(code: CodeType, instructions: list[dis.Instruction]) -> Iterator[Mention]:
    aliases: dict[str, Mention] = {}
    imported: Mention | None = None
    chain: Mention | None = None
    for place, each in enumerate(instructions):
        name = each.argval
        if chain is not None and each.opname in _ATTRIBUTE:
            chain = Mention(chain.origin, chain.name, (*chain.attributes, name))
            continue
        if chain is not None:
            yield chain
            if each.opname == "STORE_FAST" and chain.origin is Origin.MODULE:
                aliases[name] = chain
        chain = None
        if each.opname in _GLOBAL:
            chain = Mention(Origin.GLOBAL, name)
        elif each.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in code.co_freevars:
            chain = Mention(Origin.FREE, name)
        elif each.opname == "IMPORT_NAME":
            imported = _imported(instructions, place)
            chain = imported
        elif each.opname == "IMPORT_FROM" and imported is not None:
            chain = Mention(Origin.MODULE, imported.name, (name,))
        elif each.opname in ("LOAD_FAST", "LOAD_FAST_CHECK"):
            chain = aliases.get(name)


def _imported(instructions: list[dis.Instruction], place: int) -> Mention:
    """What is on the stack after the import at ``place``: a package, unless names are taken."""
    level, names = (i.argval for i in instructions[place - 2 : place])
    name = str(instructions[place].argval)
    if not names:
        name = name.partition(".")[0]
    return Mention(Origin.MODULE, "." * level + name)


def absolute(name: str, package: str | None) -> str:
    """The absolute name of a module that code in ``package`` imports by ``name``."""
    return importlib.util.resolve_name(name, package) if name.startswith(".") else name

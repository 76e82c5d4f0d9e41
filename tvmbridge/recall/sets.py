"""Sets that code makes: their order depends on the hashes of texts, which each process draws."""

from __future__ import annotations

import dis
import types

_MAKING = frozenset({"BUILD_SET", "SET_UPDATE", "SET_ADD"})
_NAMES = frozenset({"set", "frozenset"})


def makes_sets(code: types.CodeType) -> bool:
    """Whether ``code`` makes a set, or reads a constant one for more than a test of membership."""
    if _NAMES & {*code.co_names}:
        return True
    constant = False
    for each in dis.get_instructions(code):
        if each.opname in _MAKING or (constant and each.opname != "CONTAINS_OP"):
            return True
        constant = each.opcode in dis.hasconst and type(each.argval) is frozenset
    return False


def order_of_sets() -> str:
    """Return a text that is equal in two processes if their sets of texts have the same order."""
    return f"order {hash(__name__)}"

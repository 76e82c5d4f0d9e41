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
    before = None
    for each in dis.get_instructions(code):
        if each.opname in _MAKING:
            return True
        constant = before is not None and type(before.argval) is frozenset
        if constant and before.opcode in dis.hasconst and each.opname != "CONTAINS_OP":
            return True
        before = each
    return False


def order_of_sets() -> str:
    """Return a text that is equal in two processes if their sets of texts have the same order."""
    return f"order {hash(__name__)}"

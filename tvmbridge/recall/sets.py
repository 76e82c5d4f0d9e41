"""Sets: their order depends on hashes of texts, which differ between processes."""

from __future__ import annotations

import dis
import itertools
import re
import types

_MAKING = frozenset({"BUILD_SET", "SET_UPDATE", "SET_ADD"})
_NAMES = frozenset({"set", "frozenset"})
_WRITING = ("STORE", "DELETE")
_WITHOUT_EFFECT = frozenset({"CACHE", "PRECALL", "PUSH_NULL", "RESUME", "NOP"})
# Tests of a value's class, in the letters of :func:`_letter`:
# ``isinstance(value.name, (list, set))`` and ``kind in (list, set)``.
_TUPLE = "(?:" + "|".join(f"(?:[SL]A*){{{n}}}{n}" for n in range(1, 10)) + ")"
_TESTS = re.compile(f"ILA*(?:S|{_TUPLE})C|{_TUPLE}N")


def makes_sets(code: types.CodeType) -> bool:
    """Whether ``code`` makes a set, or reads a constant one for more than a test of membership."""
    if _NAMES & {*code.co_names} and "S" in _TESTS.sub("", "".join(map(_letter, _steps(code)))):
        return True
    constant = False
    for each in dis.get_instructions(code):
        if each.opname in _MAKING or (constant and each.opname != "CONTAINS_OP"):
            return True
        constant = each.opcode in dis.hasconst and type(each.argval) is frozenset
    return False


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [s for s in dis.get_instructions(code) if s.opname not in _WITHOUT_EFFECT]


def _letter(step: dis.Instruction) -> str:
    """Return a letter for the kind of an instruction, for the patterns in ``_TESTS``."""
    if step.opname.startswith("LOAD_ATTR"):
        return "A"
    if step.opname.startswith("LOAD_"):
        name = step.argval if isinstance(step.argval, str) else ""
        tests = step.opname == "LOAD_GLOBAL" and name in ("isinstance", "issubclass")
        return "S" if name in _NAMES else "I" if tests else "L"
    if step.opname == "BUILD_TUPLE" and 1 <= step.argval <= 9:
        return str(step.argval)
    if step.opname.startswith("CALL") and step.argval == 2:
        return "C"
    return "N" if step.opname == "CONTAINS_OP" else "."


def names_used(code: types.CodeType) -> frozenset[str]:
    """Return the names whose values ``code`` uses for more than a test of membership.

    Identifiers among its texts count, since ``getattr`` may look them up.
    """
    steps = _steps(code)
    named = {*dis.hasname, *dis.hasfree}
    used = {
        str(step.argval)
        for step, after in itertools.pairwise(steps)
        if step.opcode in named and not step.opname.startswith(_WRITING)
        if after.opname != "CONTAINS_OP"
    }
    return frozenset(used.union(c for c in code.co_consts if isinstance(c, str)))


def order_of_sets() -> str:
    """Return a text that processes share if sets of texts have the same order in them."""
    return f"order {hash(__name__)}"

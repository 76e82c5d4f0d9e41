"""Strides: find code of gradients whose result depends on the strides of a tensor.

A trace of a backward has gradients with other strides than a call: the gradient of a sum is an
expanded tensor in a call.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from tvmbridge.core.contents import MISSING
from tvmbridge.graph_capture.observe.executed import is_library
from tvmbridge.graph_capture.observe.names import names_of
from tvmbridge.graph_capture.observe.sources import Attributes

# Methods whose results depend on the strides of a tensor.
_LAYOUT = frozenset(
    {"is_contiguous", "stride", "storage_offset", "as_strided", "dim_order"}
    | {"is_non_overlapping_and_dense"}
)
# Instructions that Python versions add to the same code.
_FILLING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "TO_BOOL"})
_WRAPPED = (staticmethod, classmethod, types.MethodType)
_ASKS = ["LOAD_FAST", "is_contiguous", "CALL"]
_MAKES = ["LOAD_FAST", "contiguous", "CALL"]


def strides_asked(function: Any) -> str | None:
    """Return the method by which ``function``, or one that it names, asks for strides; or None."""
    waiting, met = [function], set[int]()
    while waiting:
        each = waiting.pop()
        each = each.__func__ if isinstance(each, _WRAPPED) else each
        if not isinstance(each, types.FunctionType) or id(each) in met:
            continue
        met.add(id(each))
        cells = each.__closure__ or ()
        waiting += [Attributes(cell).get("cell_contents", MISSING) for cell in cells]
        for code in () if is_library(each.__module__) else _with_inner(each.__code__):
            asked = layout_asked(code)
            if asked is not None:
                return asked
            waiting += _named(each, code)
    return None


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def _named(function: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    """Yield the values that ``code`` names in globals, and in the users' modules and classes."""
    names = names_of(code)
    for value in map(function.__globals__.get, names.globals):
        yield value
        if isinstance(value, types.ModuleType):
            owner = value.__name__
        elif isinstance(value, type):
            owner = value.__module__
        else:
            continue
        for name in () if is_library(owner) else names.looked_up:
            yield inspect.getattr_static(value, name, None)


@functools.lru_cache(maxsize=4096)
def layout_asked(code: types.CodeType) -> str | None:
    """Return the method by which ``code`` asks for strides, such as ``is_contiguous``, or None.

    A question that only decides whether to call ``contiguous()`` does not count.
    """
    steps = [s for s in dis.get_instructions(code) if s.opname not in _FILLING]
    for place, step in enumerate(steps):
        if _method(step) in _LAYOUT and not _makes_contiguous(steps, place):
            return str(step.argval)
    return None


def _method(step: dis.Instruction) -> str | None:
    """Return the name of the method that an instruction loads, or None."""
    # Since Python 3.12 LOAD_ATTR loads methods, too.
    loads = step.opname == "LOAD_METHOD" or (
        step.opname == "LOAD_ATTR" and step.argrepr != step.argval
    )
    return str(step.argval) if loads else None


def _makes_contiguous(steps: Sequence[dis.Instruction], place: int) -> bool:
    """Whether the question at ``place`` only decides whether to call ``contiguous()``."""
    asks, branch = steps[max(place - 1, 0) : place + 3], steps[place + 3 :]
    offsets = [s.offset for s in branch]
    if len(asks) < 4 or asks[-1].argval not in offsets:
        return False
    goal = offsets.index(asks[-1].argval)
    kinds = [*map(_kind, asks)]
    if kinds == [*_ASKS, "IF_TRUE"]:  # if not x.is_contiguous(): x = x.contiguous()
        used = [asks[0], *branch[:goal]]
        return [*map(_kind, branch[:goal])] == [*_MAKES, "STORE_FAST"] and _of_one_name(used)
    # x if x.is_contiguous() else x.contiguous()
    used = [asks[0], *branch[:1], *branch[goal : goal + 3]]
    found = [*kinds, *map(_kind, used[1:])]
    if found != [*_ASKS, "IF_FALSE", "LOAD_FAST", *_MAKES] or not _of_one_name(used):
        return False
    return _ends_alike(branch[1:goal], branch[goal + 3 :])


def _of_one_name(steps: Sequence[dis.Instruction]) -> bool:
    return len({s.argval for s in steps if "_FAST" in s.opname}) == 1


def _ends_alike(first: Sequence[dis.Instruction], second: Sequence[dis.Instruction]) -> bool:
    """Whether ``first`` jumps to ``second``, or returns after the same instructions."""
    if [*map(_kind, first)] == ["JUMP"]:
        return bool(second) and first[0].argval == second[0].offset
    same = [(s.opname, s.argval) for s in first] == [
        (s.opname, s.argval) for s in second[: len(first)]
    ]
    return same and bool(first) and first[-1].opname == "RETURN_VALUE"


def _kind(step: dis.Instruction) -> str:
    """Return a name of an instruction that is the same in all versions of Python."""
    method = _method(step)
    if method is not None:
        return method
    if step.opname == "CALL":
        return "CALL" if step.arg == 0 else "CALL with arguments"
    if step.opname.startswith("LOAD_FAST"):
        return "LOAD_FAST" if isinstance(step.argval, str) else step.opname
    for end in ("IF_TRUE", "IF_FALSE"):
        if step.opname.startswith("POP_JUMP") and step.opname.endswith(end):
            return end
    return "JUMP" if step.opname.startswith("JUMP_FORWARD") else step.opname

"""Evaluate the conditions that an exported function requires of its symbolic sizes.

A condition is a number, the name of a symbol, or a list of an operator's name and its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[str, Callable[..., Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda *each: all(each),
    "or": lambda *each: any(each),
    "not": lambda a: not a,
    "add": lambda *each: sum(each),
    "mul": lambda *each: math.prod(each),
    "mod": lambda a, b: a % b,
    "floordiv": lambda a, b: a // b,
    "max": max,
    "min": min,
}
_SIGNS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "and",
    "or": "or",
    "add": "+",
    "mul": "*",
    "mod": "%",
    "floordiv": "//",
}


def value_of(condition: Any, sizes: Mapping[str, int]) -> Any:
    """Return the value of a condition, or of an expression in one, for these sizes."""
    if isinstance(condition, str):
        return sizes[condition]
    if isinstance(condition, list):
        operator, *operands = condition
        return _OPERATORS[operator](*(value_of(each, sizes) for each in operands))
    return condition


def text_of(condition: Any) -> str:
    """Return a condition as readable text."""
    if not isinstance(condition, list):
        return str(condition)
    operator, *operands = condition
    parts = [text_of(each) for each in operands]
    if operator in _SIGNS:
        return f"({f' {_SIGNS[operator]} '.join(parts)})"
    return f"{operator}({', '.join(parts)})"

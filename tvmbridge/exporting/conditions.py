"""Write the conditions on symbolic sizes in a form that the runtime can evaluate.

A condition is a number, the name of a symbol, or a list of an operator's name and its operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]

from tvmbridge.core.errors import ExportError
from tvmbridge.graph_capture.relations import Relations
from tvmbridge.symbolic.symbols import Symbols

# From names of classes of sympy and of PyTorch to the runtime's names of operators.
_OPERATORS = {
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
    "And": "and",
    "Or": "or",
    "Not": "not",
    "Add": "add",
    "Mul": "mul",
    "Mod": "mod",
    "PythonMod": "mod",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Max": "max",
    "Min": "min",
}


def written_relations(
    relations: Relations, symbols: Symbols, names: Sequence[str]
) -> list[list[Any]]:
    """Return the conditions of a trace that do not follow from the bounds of its symbols.

    Raises:
        ExportError: a condition has an operator that the runtime does not have.
    """
    name_of: dict[Any, str] = {}
    for name, group in zip(names, symbols.dimensions, strict=True):
        for leaf, number in group:
            name_of[relations.shapes[leaf][number]] = name
    found: list[list[Any]] = []
    for guard in relations.guards:
        condition = guard.subs(relations.replaced)
        if condition == sympy.true or _always_holds(condition, relations.bounds):
            continue
        found.append(_written(condition, name_of))
    return found


def _always_holds(condition: Any, bounds: Mapping[Any, tuple[int, int]]) -> bool:
    """Whether a comparison of one symbol with a number holds within the symbol's bounds."""
    free = list(condition.free_symbols)
    if len(free) != 1 or free[0] not in bounds or not isinstance(condition, sympy.Rel):
        return False
    if isinstance(condition, sympy.Eq | sympy.Ne):
        return False
    if not all(side == free[0] or side.is_Integer for side in condition.args):
        return False
    return all(condition.subs(free[0], end) == sympy.true for end in bounds[free[0]])


def _written(expression: Any, name_of: Mapping[Any, str]) -> Any:
    if isinstance(expression, sympy.Symbol) and expression in name_of:
        return name_of[expression]
    if getattr(expression, "is_Integer", False):
        return int(expression)
    operator = _OPERATORS.get(type(expression).__name__)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
        operands = [_written(expression.base, name_of)] * int(expression.exp)
        return ["mul", *operands]
    if operator is None:
        raise ExportError(
            f"forward takes for granted that {expression}, which an exported function cannot "
            "check; export it for fixed sizes"
        )
    return [operator, *(_written(each, name_of) for each in expression.args)]

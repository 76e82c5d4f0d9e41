"""Check that the arguments of a call have sizes that a graph was traced for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from sympy.printing.str import StrPrinter  # type: ignore[import-untyped]

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.generated import Scope
from tvmbridge.graph_capture.relations import Relations

_FUNCTIONS: dict[str, Any] = {
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "Max": max,
    "Min": min,
    "True": True,
    "False": False,
}


def sizes_check(
    leaves: Sequence[Any],
    relations: Relations | None,
    shapes: Callable[[Sequence[Any]], Sequence[Any]],
    degenerate: Collection[int] = (),
) -> Callable[[Sequence[Any]], bool]:
    """Return a function that says whether the sizes of a call's leaves fit a traced graph.

    Args:
        shapes: returns the shapes of the traced arguments, given the leaves of a call.
        degenerate: positions of the traced arguments whose sizes may also be 0 or 1, which symbols
            exclude.

    Raises:
        CaptureError: a relation cannot be evaluated, or the sample does not fulfil it.
    """
    hold = _compiled(relations, degenerate) if relations is not None else lambda _: True
    ranks = [(i, leaf.dim()) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def fits(leaves: Sequence[Any]) -> bool:
        return all(leaves[i].dim() == rank for i, rank in ranks) and hold(shapes(leaves))

    try:
        if fits(leaves):
            return fits
    except Exception as error:
        raise CaptureError(f"a relation between sizes cannot be evaluated: {error}") from error
    raise CaptureError("the sizes of the sample do not fit the traced graph")


def _compiled(relations: Relations, degenerate: Collection[int]) -> Callable[[Sequence[Any]], bool]:
    """Return a function that says whether sizes fit the relations."""
    names: dict[Any, str] = {}
    text = _Text(names)
    lines: list[str] = []
    late: list[tuple[str, Any]] = []
    small: set[Any] = set()
    for leaf, shape in relations.shapes.items():
        for dim, expression in enumerate(shape):
            size = f"shapes[{leaf}][{dim}]"
            if isinstance(expression, sympy.Symbol) and expression not in names:
                names[expression] = f"size{len(names)}"
                if leaf in degenerate:
                    small.add(expression)
                lines.append(f"{names[expression]} = {size}")
            else:
                late.append((size, expression))
    lines += [f"if {size} != {text.doprint(other)}: return False" for size, other in late]
    for symbol, (least, most) in relations.bounds.items():
        if symbol in names:
            least = 0 if symbol in small else least
            lines.append(f"if not {least} <= {names[symbol]} <= {most}: return False")
    for guard in relations.guards:
        if guard.free_symbols <= names.keys():
            lines.append(f"if not ({text.doprint(guard)}): return False")
    lines.append("return True")
    source = "def fits(shapes):\n" + "".join(f"    {line}\n" for line in lines)
    function: Callable[[Sequence[Any]], bool]
    function = Scope(_FUNCTIONS).function("fits", source, "<sizes>")
    return function


class _Text(StrPrinter):
    """Writes expressions of sizes with generated names.

    A symbol's own name may come from a user, so it may be no valid or no unique identifier.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, symbol: Any) -> str:
        return self._names[symbol]

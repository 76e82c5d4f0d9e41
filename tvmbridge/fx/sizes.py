"""Check that the arguments of a call have the types and sizes that a graph was traced for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from sympy.printing.str import StrPrinter  # type: ignore[import-untyped]

from tvmbridge.calls.plain import PLAIN
from tvmbridge.core.contents import same_value
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.generated import Scope
from tvmbridge.core.reasons import Kind, Reason
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


class LeafSizes:
    """Compares the argument leaves of calls with the leaves that were traced.

    Args:
        leaves: the leaves of the sample.
        relations: the relations between their sizes; None if no argument is a tensor.
        shapes: returns the shapes of the traced arguments, given the leaves of a call.
        degenerate: positions of the traced arguments whose sizes may also be 0 or 1, which symbols
            exclude.

    Raises:
        CaptureError: a relation cannot be evaluated, or the sample does not fulfil it.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        relations: Relations | None,
        shapes: Callable[[Sequence[Any]], Sequence[Any]],
        degenerate: Collection[int] = (),
    ) -> None:
        tensors = {i: t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        self._kinds = [(i, t.dtype, t.device, t.dim()) for i, t in tensors.items()]
        self._constants = [(i, leaf) for i, leaf in enumerate(leaves) if i not in tensors]
        self._shapes = shapes
        self._fits = _compiled(relations, degenerate) if relations is not None else lambda _: True
        try:
            refused = self.mismatch(leaves)
        except Exception as error:
            raise CaptureError(f"a relation between sizes cannot be told: {error}") from error
        if refused is not None:
            raise CaptureError(f"the traced graph does not fit the sample: {refused}")

    def mismatch(self, leaves: Sequence[Any]) -> Reason | None:
        """Return why the graph cannot serve a call with these leaves; None if it can."""
        for i, dtype, device, rank in self._kinds:
            tensor = leaves[i]
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
                return Reason(Kind.NOT_PLAIN)
            if tensor.dtype is not dtype:
                return Reason(Kind.DTYPE)
            if tensor.device != device:
                return Reason(Kind.DEVICE)
            if tensor.dim() != rank:
                return Reason(Kind.SHAPE)
        for i, value in self._constants:
            if not same_value(leaves[i], value):
                return Reason(Kind.CONSTANT)
        return None if self._fits(self._shapes(leaves)) else Reason(Kind.SHAPE)


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

"""Relations between sizes: what forward and PyTorch's own code take for granted of symbolic ones.

torch.export traces the module with symbols in place of the sizes and notes each decision that
depends on them: a branch, a bound, a divisor. Code that was compiled for some sizes is right for
others where all of these decisions are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from tvmbridge.core.errors import CaptureError

# Without a bound of its own a size may be anything.
_UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Relations:
    """The decisions of a trace, and the symbols of the dimensions that they are about.

    ``shapes`` are the sizes of the tensors among the arguments, by the number of the leaf: integers
    and sympy's expressions. ``bounds`` are the least and greatest size of each symbol. ``replaced``
    are symbols that the trace found to be expressions of others, which stand in ``shapes``.
    """

    shapes: Mapping[int, tuple[Any, ...]]
    bounds: Mapping[Any, tuple[int, int]]
    guards: tuple[Any, ...] = field(repr=False)
    replaced: Mapping[Any, Any] = field(default_factory=dict, repr=False)

    def broken(self, sizes: Mapping[int, Sequence[int]]) -> str | None:
        """Which relation does not hold for arguments of these sizes; None: all do."""
        known = self.symbols(sizes)
        for leaf, shape in self.shapes.items():
            for expression, size in zip(shape, sizes[leaf], strict=True):
                if _at(expression, known) != size:
                    return f"a size is {expression}, and not {size}"
        for symbol, (least, most) in self.bounds.items():
            if symbol in known and not least <= known[symbol] <= most:
                return f"a size is {known[symbol]}, and not between {least} and {most}"
        for guard in self.guards:
            if _at(guard, known) != sympy.true:
                return f"not {guard}"
        return None

    def symbols(self, sizes: Mapping[int, Sequence[int]]) -> dict[Any, int]:
        """The symbols for arguments of these sizes."""
        known: dict[Any, int] = {}
        for leaf, shape in self.shapes.items():
            for expression, size in zip(shape, sizes[leaf], strict=True):
                if isinstance(expression, sympy.Symbol):
                    known.setdefault(expression, size)
        for leaf, shape in self.shapes.items():
            for expression, size in zip(shape, sizes[leaf], strict=True):
                symbol, scale, offset = affine(expression) or (None, 1, 0)
                if symbol is not None and not (size - offset) % scale:
                    known.setdefault(symbol, (size - offset) // scale)
        for symbol, expression in self.replaced.items():
            value = _at(expression, known)
            if getattr(value, "is_Integer", False):
                known.setdefault(symbol, int(value))
        self._follow_equations(known)
        return known

    def _follow_equations(self, known: dict[Any, int]) -> None:
        """Add symbols of which a guard says what they are equal to."""
        for guard in (g for g in self.guards if isinstance(g, sympy.Eq)):
            for symbol, other in (guard.args, reversed(guard.args)):
                if isinstance(symbol, sympy.Symbol) and symbol not in known:
                    value = _at(other, known)
                    if value.is_Integer:
                        known[symbol] = int(value)

    def most(self, leaf: int, dimension: int) -> int:
        """The greatest size that a dimension of an argument may have."""
        expression = self.shapes[leaf][dimension]
        return self.bounds.get(expression, (0, _UNBOUNDED))[1]

    def is_symbolic(self, leaf: int, dimension: int) -> bool:
        """Whether a dimension depends on symbols: otherwise forward demands its size."""
        expression = self.shapes[leaf][dimension]
        return isinstance(expression, sympy.Basic) and bool(expression.free_symbols)


def affine(expression: Any) -> tuple[Any, int, int] | None:
    """The symbol, scale and offset of an expression ``scale * symbol + offset``; None: no such."""
    if not isinstance(expression, sympy.Basic) or len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    offset, more = (expression.subs(symbol, n) for n in (0, 1))
    scale = more - offset
    if not (offset.is_Integer and scale.is_Integer and scale > 0):
        return None
    if sympy.expand(scale * symbol + offset - expression) != 0:
        return None
    return symbol, int(scale), int(offset)


def relations_in(program: Any) -> Relations:
    """Those that a program of torch.export holds.

    Raises:
        CaptureError: no argument is a tensor.
    """
    names = program.graph_signature.user_inputs
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    shapes: dict[int, tuple[Any, ...]] = {}
    environment: Any = None
    for leaf, name in enumerate(names):
        value: Any = nodes[name].meta.get("val") if name in nodes else None
        if isinstance(value, torch.Tensor):
            shapes[leaf] = tuple(_expression(size) for size in value.shape)
            environment = environment or value.fake_mode.shape_env  # type: ignore[attr-defined]
    if environment is None:
        raise CaptureError("no argument is a tensor")
    bounds = {
        symbol: (_integer(found.lower, 0), _integer(found.upper, _UNBOUNDED))
        for symbol, found in environment.var_to_range.items()
    }
    asserts = [a.expr for each in environment.deferred_runtime_asserts.values() for a in each]
    guards = [guard.expr for guard in environment.guards]
    replaced = {symbol: environment.replace(symbol) for symbol in environment.replacements}
    return Relations(shapes, bounds, tuple(dict.fromkeys([*guards, *asserts])), replaced)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _integer(bound: Any, otherwise: int) -> int:
    return int(bound) if bound.is_Integer and abs(int(bound)) < _UNBOUNDED else otherwise


def _at(expression: Any, known: Mapping[Any, int]) -> Any:
    return expression.subs(known) if isinstance(expression, sympy.Basic) else expression

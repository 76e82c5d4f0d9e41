"""Relations between sizes: the conditions under which a trace with symbolic sizes is valid.

torch.export traces the module with symbols in place of the sizes. It records each decision on them
in forward or in PyTorch's own code: a branch, a bound, a divisor. Code that was compiled for some
sizes is correct for other sizes if all decisions come out the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.symbolic_numbers import expression_of, hint_of
from tvmbridge.core.torch_private import pytree

# The upper bound of a size that has none of its own.
_UNBOUNDED = 1 << 40
# Sizes that are this many times those of a trace decide between equal expressions.
_FAR = 1 << 10


@dataclass(frozen=True)
class Relations:
    """The decisions on sizes in a trace, and the symbols of the argument's dimensions.

    - ``shapes``: the shapes of the tensors with dimensions among the arguments, by the number of
      the leaf; each size is an integer or a sympy expression
    - ``bounds``: the least and the greatest value of each symbol
    - ``guards``: sympy conditions that must be true
    - ``replaced``: symbols that the trace found equal to expressions of other symbols, with these
      expressions; ``shapes`` has the expressions
    - ``extremes``: the guards that say which argument each minimum and maximum is
    """

    shapes: Mapping[int, tuple[Any, ...]]
    bounds: Mapping[Any, tuple[int, int]]
    guards: tuple[Any, ...] = field(repr=False)
    replaced: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    extremes: tuple[Any, ...] = field(default=(), repr=False)

    def broken(self, sizes: Mapping[int, Sequence[int]]) -> str | None:
        """Describe a relation that does not hold for arguments of these sizes; None if all hold."""
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

    def same_extremes(self, sizes: Mapping[int, Sequence[int]]) -> bool:
        """Whether each minimum and maximum is the argument that it is in code from the trace."""
        known = self.symbols(sizes)
        return all(_at(condition, known) == sympy.true for condition in self.extremes)

    def symbols(self, sizes: Mapping[int, Sequence[int]]) -> dict[Any, int]:
        """Return the values of the symbols for arguments of these sizes."""
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
        """Add values of symbols that an equation among the guards determines."""
        for guard in (g for g in self.guards if isinstance(g, sympy.Eq)):
            for symbol, other in (guard.args, reversed(guard.args)):
                if isinstance(symbol, sympy.Symbol) and symbol not in known:
                    value = _at(other, known)
                    if value.is_Integer:
                        known[symbol] = int(value)

    def most(self, leaf: int, dimension: int) -> int:
        """Return the greatest size that a dimension of an argument may have."""
        expression = self.shapes[leaf][dimension]
        return self.bounds.get(expression, (0, _UNBOUNDED))[1]

    def is_symbolic(self, leaf: int, dimension: int) -> bool:
        """Whether the size of a dimension depends on symbols; if not, forward demands the size."""
        expression = self.shapes[leaf][dimension]
        return isinstance(expression, sympy.Basic) and bool(expression.free_symbols)


def expressions_in(program: Any) -> list[Any]:
    """Return the expressions of sizes in the shapes and numbers of an exported program."""
    found: dict[Any, None] = {}
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            found |= {n.node.expr: None for n in sizes if isinstance(n, torch.SymInt)}
    return list(found)


def _extremes(program: Any, hints: Mapping[Any, int]) -> Iterator[Any]:
    """Yield conditions under which each minimum and maximum of sizes is the one that it is traced.

    The diagonal of ``s`` rows and 8 columns, for example, has ``Min(8, s)`` elements. Code has one
    of the two. If both are equal in the trace, it is the one that larger sizes have.
    """
    far = {symbol: _FAR * value for symbol, value in hints.items()}
    parts = {p for e in expressions_in(program) for p in sympy.preorder_traversal(e)}
    for function in sorted(parts, key=str):
        name = type(function).__name__  # PyTorch's classes, which are private
        if name in ("Min", "Max"):
            traced, sign = function.subs(hints), 1 if name == "Min" else -1
            equal = [a for a in function.args if a.subs(hints) == traced]
            if not equal:
                raise CaptureError(f"forward takes {function}, of a size that is not known")
            chosen = min(equal, key=lambda a, sign=sign: sign * a.subs(far))  # type: ignore[misc]
            of = sympy.Le if name == "Min" else sympy.Ge
            yield from (of(chosen, a) for a in function.args if a is not chosen)


def affine(expression: Any) -> tuple[Any, int, int] | None:
    """Return symbol, scale and offset if ``expression`` is ``scale * symbol + offset``, or None."""
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
    """Return the relations that an exported program was traced under.

    Raises:
        CaptureError: no argument is a tensor, or data decide which of two sizes is smaller.
    """
    names = program.graph_signature.user_inputs
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    shapes: dict[int, tuple[Any, ...]] = {}
    traced: dict[int, list[int]] = {}
    environment: Any = None
    for leaf, name in enumerate(names):
        value: Any = nodes[name].meta.get("val") if name in nodes else None
        if isinstance(value, torch.Tensor):
            if value.dim():  # without dimensions, it may stand for a Python number
                shapes[leaf] = tuple(expression_of(size) for size in value.shape)
                traced[leaf] = [int(hint_of(size)) for size in value.shape]
            environment = environment or value.fake_mode.shape_env  # type: ignore[attr-defined]
    if environment is None:
        raise CaptureError("no argument is a tensor")
    bounds: dict[Any, tuple[int, int]] = {
        symbol: (_integer(found.lower, 0), _integer(found.upper, _UNBOUNDED))
        for symbol, found in environment.var_to_range.items()
    }
    asserts = [a.expr for each in environment.deferred_runtime_asserts.values() for a in each]
    guards = [guard.expr for guard in environment.guards]
    replaced = {symbol: environment.replace(symbol) for symbol in environment.replacements}
    found = Relations(shapes, bounds, tuple(dict.fromkeys([*guards, *asserts])), replaced)
    extremes = dict.fromkeys(_extremes(program, found.symbols(traced)))
    for condition in extremes:
        _bound(bounds, condition)
    return replace(found, guards=(*found.guards, *extremes), extremes=tuple(extremes))


def _bound(bounds: dict[Any, tuple[int, int]], condition: Any) -> None:
    """Lower the upper bound of a symbol where ``condition`` compares it with a number."""
    if isinstance(condition, sympy.Le | sympy.Ge) and condition.gts.is_Integer:
        symbol, scale, offset = affine(condition.lts) or (None, 1, 0)
        if symbol in bounds:
            least, most = bounds[symbol]
            bounds[symbol] = least, min(most, (int(condition.gts) - offset) // scale)


def _integer(bound: Any, otherwise: int) -> int:
    return int(bound) if bound.is_Integer and abs(int(bound)) < _UNBOUNDED else otherwise


def _at(expression: Any, known: Mapping[Any, int]) -> Any:
    return expression.subs(known) if isinstance(expression, sympy.Basic) else expression

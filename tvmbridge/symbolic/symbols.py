"""The symbols of symbolic code: each symbol is a number that gives the sizes of some dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.symbolic.sizes import Point

# A dimension of an argument: the number of its leaf, and the number of the dimension.
Dimension: TypeAlias = tuple[int, int]
# The number of the leaf and the shape, for each tensor among the arguments.
Shapes: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]

# The least value of a symbol: sizes of 0 and 1 behave differently in broadcasting.
LEAST_SIZE = 2
# The least common first size of all arguments that is taken for the rows of a batch.
_LEAST_ROWS = 3


class LinearSize(NamedTuple):
    """A size as a linear function of a symbol: ``scale * symbol + offset``."""

    scale: int = 1
    offset: int = 0

    def size(self, symbol: int) -> int:
        """Return the size for this value of the symbol."""
        return self.scale * symbol + self.offset

    def symbol(self, size: int) -> int | None:
        """Return the value of the symbol that gives this size; None if no integer does."""
        symbol, rest = divmod(size - self.offset, self.scale)
        return None if rest else symbol


# The form of a size that equals its symbol.
ITSELF = LinearSize()


@dataclass(frozen=True)
class Symbols:
    """The symbols of a signature, and the dimensions whose sizes they give.

    A point is a tuple with the value of each symbol.

    - ``dimensions``: for each symbol, the dimensions whose sizes depend on it.
    - ``forms``: for dimensions whose size is not the symbol itself, how it depends on the symbol.

    Example: ``f(x, y)`` with shapes ``(b, 4)`` and ``(b, s)`` has the dimensions
    ``(((0, 0), (1, 0)), ((1, 1),))``.
    """

    dimensions: tuple[tuple[Dimension, ...], ...]
    forms: Mapping[Dimension, LinearSize] = field(default_factory=dict)

    @classmethod
    def of(cls, *calls: Shapes) -> Symbols | None:
        """Return symbols for the dimensions whose sizes differ between ``calls``.

        Dimensions that have equal sizes within each call share a symbol. None: the number of
        dimensions of an argument differs between the calls.
        """
        sizes: dict[tuple[int, ...], list[Dimension]] = {}
        for arguments in zip(*calls, strict=True):
            if len({len(shape) for _, shape in arguments}) > 1:
                return None
            leaf = arguments[0][0]
            for number, seen in enumerate(zip(*(shape for _, shape in arguments), strict=True)):
                if len(set(seen)) > 1:
                    sizes.setdefault(seen, []).append((leaf, number))
        return cls(tuple(map(tuple, sizes.values())))

    def with_rows(self, shapes: Shapes) -> Symbols | None:
        """Return these symbols and one for the first dimension of all arguments, a batch's rows.

        None: the first dimensions differ in size or are small, or one of them is a symbol already.
        """
        first = {(leaf, 0): shape[0] for leaf, shape in shapes if shape}
        known = {d for group in self.dimensions for d in group}
        rows = set(first.values())
        if len(rows) != 1 or min(rows) < _LEAST_ROWS or known & first.keys():
            return None
        return Symbols((tuple(first), *self.dimensions))

    def point(self, leaves: Sequence[Any]) -> Point | None:
        """Return the point of a call; None if a value is 0 or 1, or sizes of a symbol disagree."""
        found = self.sizes(leaves)
        return None if found is None or min(found) < LEAST_SIZE else found

    def sizes(self, leaves: Sequence[Any]) -> Point | None:
        """Return the point of a call, in which values may be 1.

        None: a value is 0, or sizes of one symbol disagree.
        """
        shapes = {i: leaf.shape for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        found: list[int] = []
        for dimensions in self.dimensions:
            numbers = {self.form(d).symbol(shapes[d[0]][d[1]]) for d in dimensions}
            number = numbers.pop()
            if numbers or number is None or number < 1:
                return None
            found.append(number)
        return tuple(found)

    def form(self, dimension: Dimension) -> LinearSize:
        """Return how the size of a dimension depends on its symbol."""
        return self.forms.get(dimension, ITSELF)

    def where(self, chosen: Sequence[bool]) -> Symbols:
        """Return only the symbols whose flag in ``chosen`` is True."""
        return replace(self, dimensions=tuple(itertools.compress(self.dimensions, chosen)))

    def are_all(self, sample: Shapes, leaves: Sequence[Any]) -> bool:
        """Whether a call differs from a sample only in the sizes of symbolic dimensions."""
        symbolic = {d for dimensions in self.dimensions for d in dimensions}
        return all(
            len(shape) == leaves[i].dim()
            and all(
                (i, d) in symbolic or size == leaves[i].shape[d] for d, size in enumerate(shape)
            )
            for i, shape in sample
        )

    def point_of(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """Return the point of a call with these shapes, which must fit the symbols."""
        first = (dimensions[0] for dimensions in self.dimensions)
        return tuple(
            (shapes[d[0]][d[1]] - self.form(d).offset) // self.form(d).scale for d in first
        )

    def apart(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """Return the point of a call, changed so that all values differ.

        torch.export would give dimensions of equal size one symbol.
        """
        taken: list[int] = []
        for size in self.point_of(shapes):
            while size in taken:
                size += 1
            taken.append(size)
        return tuple(taken)

    def probe(self, args: Any, kwargs: Any, point: Point) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments like the given ones, with the sizes of ``point``."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = {i: list(t.shape) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        for dimensions, symbol in zip(self.dimensions, point, strict=True):
            for leaf, number in dimensions:
                shapes[leaf][number] = self.form((leaf, number)).size(symbol)
        made = [_resized(leaf, shapes.get(i)) for i, leaf in enumerate(leaves)]
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(made, spec)
        return found


def _resized(leaf: Any, shape: list[int] | None) -> Any:
    """Return an uninitialised tensor like ``leaf`` with another shape."""
    if shape is None or list(leaf.shape) == shape:
        return leaf
    made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)

"""The symbols of symbolic code: dimensions of arguments whose sizes are found from one number."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.symbolic.sizes import Point

# A dimension of an argument: the number of its leaf, and of the dimension.
Dimension: TypeAlias = tuple[int, int]
Shapes: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]

# 0 and 1 mean something else to broadcasting: they are no sizes of a symbol.
LEAST_SIZE = 2
# The least rows that seem to be those of a batch.
_LEAST_ROWS = 3


class LinearSize(NamedTuple):
    """A size that is ``scale`` times a symbol, and ``offset``."""

    scale: int = 1
    offset: int = 0

    def size(self, symbol: int) -> int:
        """The size where the symbol is this number."""
        return self.scale * symbol + self.offset

    def symbol(self, size: int) -> int | None:
        """The symbol of a size; None: no symbol has it."""
        symbol, rest = divmod(size - self.offset, self.scale)
        return None if rest else symbol


# Of a size that is the symbol.
ITSELF = LinearSize()


@dataclass(frozen=True)
class Symbols:
    """The symbolic dimensions: the sizes of each symbol's are found from one number at every call.

    Args:
        dimensions: of each symbol.
        forms: of dimensions whose size is not the symbol itself.
    """

    dimensions: tuple[tuple[Dimension, ...], ...]
    forms: Mapping[Dimension, LinearSize] = field(default_factory=dict)

    @classmethod
    def of(cls, *calls: Shapes) -> Symbols | None:
        """Those of dimensions that are not of one size in all calls; None: the ranks differ.

        Dimensions that are of the same size in each call are one symbol.
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
        """These, and one for the first dimensions of all arguments, which seem to be the rows of a
        batch, since they have one size; None: they do not, or are among these."""
        first = {(leaf, 0): shape[0] for leaf, shape in shapes if shape}
        known = {d for group in self.dimensions for d in group}
        rows = set(first.values())
        if len(rows) != 1 or min(rows) < _LEAST_ROWS or known & first.keys():
            return None
        return Symbols((tuple(first), *self.dimensions))

    def point(self, leaves: Sequence[Any]) -> Point | None:
        """The sizes of the symbols in a call; None: those of one differ, or are 0 or 1."""
        found = self.sizes(leaves)
        return None if found is None or min(found) < LEAST_SIZE else found

    def sizes(self, leaves: Sequence[Any]) -> Point | None:
        """As :meth:`point`, with sizes of 1; None: those of one symbol differ, or are 0."""
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
        """How a size is found from its symbol."""
        return self.forms.get(dimension, ITSELF)

    def where(self, chosen: Sequence[bool]) -> Symbols:
        """Those of these symbols that are chosen."""
        return replace(self, dimensions=tuple(itertools.compress(self.dimensions, chosen)))

    def are_all(self, sample: Shapes, leaves: Sequence[Any]) -> bool:
        """Whether a call differs from a sample in the sizes of symbols alone."""
        symbolic = {d for dimensions in self.dimensions for d in dimensions}
        return all(
            len(shape) == leaves[i].dim()
            and all(
                (i, d) in symbolic or size == leaves[i].shape[d] for d, size in enumerate(shape)
            )
            for i, shape in sample
        )

    def point_of(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """The sizes of the symbols in a call with these shapes, which they were found in."""
        first = (dimensions[0] for dimensions in self.dimensions)
        return tuple(
            (shapes[d[0]][d[1]] - self.form(d).offset) // self.form(d).scale for d in first
        )

    def apart(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """The sizes of a call, all different: of equal ones torch.export would make one symbol."""
        taken: list[int] = []
        for size in self.point_of(shapes):
            while size in taken:
                size += 1
            taken.append(size)
        return tuple(taken)

    def probe(self, args: Any, kwargs: Any, point: Point) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as those given whose symbolic dimensions have the sizes of ``point``."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = {i: list(t.shape) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        for dimensions, symbol in zip(self.dimensions, point, strict=True):
            for leaf, number in dimensions:
                shapes[leaf][number] = self.form((leaf, number)).size(symbol)
        made = [_resized(leaf, shapes.get(i)) for i, leaf in enumerate(leaves)]
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(made, spec)
        return found


def _resized(leaf: Any, shape: list[int] | None) -> Any:
    """A tensor like ``leaf`` with this shape; nothing is read of its elements."""
    if shape is None or list(leaf.shape) == shape:
        return leaf
    made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)

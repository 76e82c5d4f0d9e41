"""The symbols of symbolic code: groups of argument dimensions whose sizes depend on one integer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.symbolic.size import Point

# A dimension of an argument: the number of the argument's leaf, and the number of the dimension.
Dimension: TypeAlias = tuple[int, int]
Shapes: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]

# 0 and 1 have another meaning in broadcasting, so a symbol cannot have these sizes.
LEAST_SIZE = 2
# How many times smaller networks make images by halving, at most.
_MOST_HALVED = 32
# The fewest dimensions of a batch of images.
_IMAGE = 4
# The fewest rows that are taken for the rows of a batch.
_LEAST_ROWS = 3
# The most elements of a resized tensor of integers that get values.
_MOST_REPEATED = 1 << 24


class LinearSize(NamedTuple):
    """A size that is ``scale`` times a symbol plus ``offset``."""

    scale: int = 1
    offset: int = 0

    def size(self, symbol: int) -> int:
        """Return the size for this value of the symbol."""
        return self.scale * symbol + self.offset

    def symbol(self, size: int) -> int | None:
        """Return the value of the symbol for this size; None if no value gives this size."""
        symbol, rest = divmod(size - self.offset, self.scale)
        return None if rest else symbol


# The form of a size that is the symbol itself.
ITSELF = LinearSize()


@dataclass(frozen=True)
class DerivedSize:
    """A size that follows from several symbols, or from one in another than a linear form.

    - ``expression``: a sympy expression of ``places``, such as the sum of two.
    - ``places``: a sympy symbol for each symbol of the code.
    """

    expression: Any
    places: tuple[Any, ...]

    def size(self, point: Sequence[int]) -> int:
        """Return the size for these values of the symbols."""
        return int(self.expression.subs(dict(zip(self.places, point, strict=True))))

    def with_values(self, values: Sequence[Any]) -> DerivedSize:
        """Return the size with ``values`` in place of the symbols; None leaves a symbol."""
        pairs = list(zip(self.places, values, strict=True))
        left = tuple(place for place, value in pairs if value is None or value.free_symbols)
        known = {place: value for place, value in pairs if value is not None}
        return DerivedSize(self.expression.subs(known, simultaneous=True), left)


@dataclass(frozen=True)
class Symbols:
    """The symbolic dimensions of a call's arguments, grouped by symbol.

    Each call gives every symbol a value, from which the sizes of the symbol's dimensions follow.

    Args:
        dimensions: for each symbol, its dimensions.
        forms: how a size follows from the symbol, for dimensions whose size is not the symbol.
        equal: for each symbol, a number; symbols with the same number had values that were equal
            or 1 in all calls. Empty: no two symbols had.
        derived: further dimensions, whose sizes follow from several symbols.
    """

    dimensions: tuple[tuple[Dimension, ...], ...]
    forms: Mapping[Dimension, LinearSize] = field(default_factory=dict)
    equal: tuple[int, ...] = ()
    derived: Mapping[Dimension, DerivedSize] = field(default_factory=dict)

    @property
    def all_dimensions(self) -> list[Dimension]:
        """All symbolic dimensions."""
        return [*itertools.chain.from_iterable(self.dimensions), *self.derived]

    @classmethod
    def of(cls, *calls: Shapes) -> Symbols | None:
        """Return symbols for the dimensions whose sizes differ between ``calls``.

        Dimensions with equal sizes in each call share a symbol. Return None if an argument has
        different ranks.
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
        """Return these symbols and one for the batch: the first dimensions of all arguments.

        Return None if the first dimensions have different or small sizes, or are symbolic already.
        """
        first = {(leaf, 0): shape[0] for leaf, shape in shapes if shape}
        known = {d for group in self.dimensions for d in group}
        rows = set(first.values())
        if len(rows) != 1 or min(rows) < _LEAST_ROWS or known & first.keys():
            return None
        return Symbols((tuple(first), *self.dimensions))

    def with_sides(self, shapes: Shapes) -> Symbols | None:
        """Return these symbols with one for each side of images that were square so far.

        Images are tensors of at least four dimensions. Return None if there are no such images.
        """
        ranks = {leaf: len(shape) for leaf, shape in shapes}
        found: list[tuple[Dimension, ...]] = []
        for group in self.dimensions:
            images = all(ranks[leaf] >= _IMAGE and number >= 2 for leaf, number in group)
            sides: dict[int, list[Dimension]] = {}
            for leaf, number in group:
                sides.setdefault(ranks[leaf] - number if images else 0, []).append((leaf, number))
            found += map(tuple, sides.values())
        if len(found) == len(self.dimensions):
            return None
        return replace(self, dimensions=tuple(found))

    def by_argument(self, *calls: Shapes) -> Symbols:
        """Return these symbols with one for each argument that has a dimension of a symbol.

        Two arguments may have equal sizes by chance, such as the texts of a translation.
        torch.export keeps symbols of equal sizes apart, and its relations join those that forward
        relates. First dimensions are the rows of a batch, and stay together. Symbols that are equal
        or 1 in each of ``calls`` count as equal: forward broadcasts a size of 1.
        """
        values = list(zip(*(self.point_of(dict(call)) for call in calls), strict=True))
        found: list[tuple[Dimension, ...]] = []
        equal: list[int] = []
        members: dict[int, list[int]] = {}
        for number, group in enumerate(self.dimensions):
            alike = (
                known
                for known, others in members.items()
                if all(_broadcast(values[other], values[number]) for other in others)
            )
            chosen = next(alike, number)
            members.setdefault(chosen, []).append(number)
            parts: dict[int, list[Dimension]] = {}
            for leaf, place in group:
                parts.setdefault(leaf if place else -1, []).append((leaf, place))
            found += map(tuple, parts.values())
            equal += [chosen] * len(parts)
        return replace(self, dimensions=tuple(found), equal=tuple(equal))

    def joined(self) -> Symbols:
        """Return these symbols with one for all that have one number in ``equal``."""
        groups: dict[int, list[Dimension]] = {}
        for number, dimensions in zip(self.equal, self.dimensions, strict=True):
            groups.setdefault(number, []).extend(dimensions)
        return replace(self, dimensions=tuple(map(tuple, groups.values())), equal=())

    def are_joined(self, leaves: Sequence[Any]) -> bool:
        """Whether dimensions whose sizes follow alike from one symbol are equal or 1 in a call."""
        for group in self.dimensions:
            sizes: dict[LinearSize, set[int]] = {}
            for leaf, number in group:
                known = sizes.setdefault(self.form((leaf, number)), set())
                known.add(leaves[leaf].shape[number])
            if any(len(each - {1}) > 1 for each in sizes.values()):
                return False
        return True

    def point(self, leaves: Sequence[Any]) -> Point | None:
        """Return the values of the symbols in a call.

        Returns:
            The values, or None if a symbol's dimensions contradict, or a value is 0 or 1.
        """
        found = self.sizes(leaves)
        return None if found is None or min(found) < LEAST_SIZE else found

    def sizes(self, leaves: Sequence[Any]) -> Point | None:
        """Like :meth:`point`, but also accept values of 1."""
        shapes = {i: leaf.shape for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        found: list[int] = []
        for dimensions in self.dimensions:
            numbers = {self.form(d).symbol(shapes[d[0]][d[1]]) for d in dimensions}
            number = numbers.pop()
            if numbers or number is None or number < 1:
                return None
            found.append(number)
        if any(shapes[d[0]][d[1]] != each.size(found) for d, each in self.derived.items()):
            return None
        return tuple(found)

    def form(self, dimension: Dimension) -> LinearSize:
        """Return how the size of ``dimension`` follows from its symbol."""
        return self.forms.get(dimension, ITSELF)

    def without(self, constants: Sequence[int | None]) -> Symbols:
        """Return only the symbols for which ``constants`` has None, and no value."""
        chosen = [value is None for value in constants]
        values = [None if value is None else sympy.Integer(value) for value in constants]
        derived = {d: each.with_values(values) for d, each in self.derived.items()}
        return replace(
            self,
            dimensions=tuple(itertools.compress(self.dimensions, chosen)),
            equal=tuple(itertools.compress(self.equal, chosen)),
            derived={d: each for d, each in derived.items() if each.expression.free_symbols},
        )

    def are_all(self, sample: Shapes, leaves: Sequence[Any]) -> bool:
        """Whether a call has the shapes of a sample, except in symbolic dimensions."""
        symbolic = set(self.all_dimensions)
        return all(
            len(shape) == leaves[i].dim()
            and all(
                (i, d) in symbolic or size == leaves[i].shape[d] for d, size in enumerate(shape)
            )
            for i, shape in sample
        )

    def point_of(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """Return the values of the symbols for ``shapes``, which must fit the symbols."""
        first = (dimensions[0] for dimensions in self.dimensions)
        return tuple(
            (shapes[d[0]][d[1]] - self.form(d).offset) // self.form(d).scale for d in first
        )

    def apart(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """Return values of the symbols near a call's sizes at which forward can be traced."""
        return self.distinct(self.point_of(shapes))

    def distinct(self, point: Point) -> Point:
        """Return values of the symbols near ``point``, none of them 1.

        Two values are equal only if their symbols had equal values in all calls, since forward may
        demand equal sizes. Otherwise they are different: code could compare different symbols that
        are equal by chance. torch.export makes constants of sizes of 1. A power of two that divides
        a size, up to 32, still does: networks halve images, and join them with what the halves
        become.
        """
        wanted: dict[int, int] = {}
        numbers = self.equal or range(len(self.dimensions))
        for number, size in zip(numbers, point, strict=True):
            wanted[number] = max(size, wanted.get(number, LEAST_SIZE))
        taken: dict[int, int] = {}
        for number, size in wanted.items():
            while size in taken.values():
                size += min(size & -size, _MOST_HALVED)
            taken[number] = size
        return tuple(taken[number] for number in numbers)

    def probe(self, args: Any, kwargs: Any, point: Point) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments like those given, with the sizes of ``point`` in symbolic dimensions.

        Tensors with symbolic dimensions are contiguous; torch.export would have further symbols
        for strides. Resized integers repeat the given ones, because forward may use them as
        indices. Other resized tensors are uninitialized: they may be larger than the memory.

        Raises:
            MemoryError: a tensor is larger than the address space that is left.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = {i: list(t.shape) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        for dimensions, symbol in zip(self.dimensions, point, strict=True):
            for leaf, number in dimensions:
                shapes[leaf][number] = self.form((leaf, number)).size(symbol)
        for (leaf, number), each in self.derived.items():
            shapes[leaf][number] = each.size(point)
        varying = {leaf for leaf, _ in self.all_dimensions}
        made = [_resized(t, shapes[i]) if i in varying else t for i, t in enumerate(leaves)]
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(made, spec)
        return found


def _broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two symbols had equal values in calls, except where one of them was 1."""
    pairs = set(zip(one, other, strict=True))
    apart = [pair for pair in pairs if pair[0] != pair[1]]
    return 0 < len(apart) < len(pairs) and all(1 in pair for pair in apart)


def _resized(leaf: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return ``leaf``, or a contiguous tensor like it of this shape."""
    if list(leaf.shape) == shape and leaf.is_contiguous():
        return leaf
    is_whole = not leaf.is_floating_point() and not leaf.is_complex()
    if is_whole and leaf.numel() and math.prod(shape) <= _MOST_REPEATED:
        return _repeated(leaf, shape)
    create = torch.zeros if is_whole else torch.empty
    try:
        made = create(shape, dtype=leaf.dtype, device=leaf.device)
    except RuntimeError as error:
        raise MemoryError(f"there is no memory for a tensor of shape {shape}: {error}") from error
    return made.requires_grad_(leaf.requires_grad)


def _repeated(leaf: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return the elements of ``leaf``, repeated along each dimension to fill ``shape``."""
    for dim, size in enumerate(shape):
        if leaf.shape[dim] != size:
            places = torch.arange(size, device=leaf.device) % leaf.shape[dim]
            leaf = leaf.index_select(dim, places)
    return leaf.contiguous()

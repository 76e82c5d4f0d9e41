"""Find combined features among the arguments of a call, and map them to the inputs of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.sparse_features import CombinedFeatures, Jagged, SparseFeatures

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def combined_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CombinedFeatures | None:
    """Return the combined features among the arguments; None if there are none, or several."""
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, CombinedFeatures)]
    return found[0] if len(found) == 1 else None


def replaced(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    by: Callable[[CombinedFeatures], Any] = CombinedFeatures.separate,
) -> Arguments:
    """Return the arguments with each :class:`CombinedFeatures` replaced by the result of ``by``.

    By default the result is a :class:`SparseFeatures` of views.
    """

    def each(value: Any) -> Any:
        return by(value) if isinstance(value, CombinedFeatures) else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


def of_size(features: CombinedFeatures, size: int | None) -> SparseFeatures:
    """Return features for tracing, with the same number of rows and ``size`` indices each.

    If ``size`` is None, neighbouring features have different numbers of indices. Only the shapes
    matter.
    """
    rows = features.lengths.shape[1]

    def jagged(number: int) -> Jagged:
        count = 2 + number % 5 if size is None else size
        weights = None if features.weights is None else features.weights.new_ones(count)
        lengths = features.lengths.new_zeros(rows)
        return Jagged(features.indices.new_zeros(count), lengths, weights)

    return SparseFeatures({name: jagged(i) for i, name in enumerate(features.names)})


@dataclass(frozen=True)
class FeaturePositions:
    """Positions of the features among the leaves of a call that has them as separate tensors.

    - ``names``: the names of the features, in order.
    - ``first``: the position of the first leaf of the first feature. Each feature has three leaves.
    - ``weighted``: whether the features have weights.
    """

    names: tuple[str, ...]
    first: int
    weighted: bool

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: CombinedFeatures
    ) -> FeaturePositions:
        """Return the positions for a call whose combined features are ``found``."""
        first = 0
        for value in (*args, *kwargs.values()):
            if value is found:
                break
            first += len(pytree.tree_leaves(value))
        return cls(found.names, first, found.weights is not None)

    def leaf(self, number: int, kind: int) -> int:
        """Return the position of a feature's indices (kind 0), lengths (1) or weights (2)."""
        return self.first + 3 * number + kind

    @property
    def indices(self) -> tuple[int, ...]:
        """Return the positions of the leaves whose size is a number of indices."""
        kinds = (0, 2) if self.weighted else (0,)
        return tuple(self.leaf(i, kind) for i in range(len(self.names)) for kind in kinds)

    def given(self, leaf: int) -> int:
        """Return the position of the same leaf in a call that has the features combined.

        Combined features are four leaves. After the pass, a graph reads a leaf of a single feature
        only if the features have no weights. Such a leaf maps to the leaf of the combined weights.
        """
        if leaf < self.first:
            return leaf
        past = leaf - self.first - 3 * len(self.names)
        return self.first + (3 if past < 0 else 4 + past)

    def shapes(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the shapes that a combined call's leaves would have with separate features."""
        shapes = shapes_of(leaves)
        rows = shapes[self.first + 1][1:]
        apart: list[Any] = []
        for size in leaves[self.first + 2].tolist():
            apart += [(size,), rows, (size,)]
        return [*shapes[: self.first], *apart, *shapes[self.first + 4 :]]


def shapes_of(leaves: Sequence[Any]) -> list[Any]:
    """Return the shape of each leaf, and None for a leaf that is no tensor."""
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

"""Combined features among the arguments of a call: found, taken apart, and read by a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.sparse_features import CombinedFeatures, Jagged, SparseFeatures

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def combined_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CombinedFeatures | None:
    """The combined features among the arguments; None where there are none, or several."""
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, CombinedFeatures)]
    return found[0] if len(found) == 1 else None


def replaced(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    by: Callable[[CombinedFeatures], Any] = CombinedFeatures.separate,
) -> Arguments:
    """The arguments with combined features in another form: as views of their tensors."""

    def each(value: Any) -> Any:
        return by(value) if isinstance(value, CombinedFeatures) else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


def of_size(features: CombinedFeatures, size: int | None) -> SparseFeatures:
    """Features with as many rows and ``size`` indices each, to be traced; None: any numbers.

    Only the shapes matter.
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
    """Where the features stand among the leaves of a call that has them apart.

    ``first`` is the number of the first leaf of the first feature, of three each.
    """

    names: tuple[str, ...]
    first: int
    weighted: bool

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: CombinedFeatures
    ) -> FeaturePositions:
        """That of a call with combined features."""
        first = 0
        for value in (*args, *kwargs.values()):
            if value is found:
                break
            first += len(pytree.tree_leaves(value))
        return cls(found.names, first, found.weights is not None)

    def leaf(self, number: int, kind: int) -> int:
        """The number of the leaf of a feature: of its indices (0), lengths (1) or weights (2)."""
        return self.first + 3 * number + kind

    @property
    def indices(self) -> tuple[int, ...]:
        """The leaves whose sizes are numbers of indices."""
        kinds = (0, 2) if self.weighted else (0,)
        return tuple(self.leaf(i, kind) for i in range(len(self.names)) for kind in kinds)

    def given(self, leaf: int) -> int:
        """The number of a leaf in a call with combined features, which are four leaves.

        What the graph still takes of single features are the weights that they do not have.
        """
        if leaf < self.first:
            return leaf
        past = leaf - self.first - 3 * len(self.names)
        return self.first + (3 if past < 0 else 4 + past)

    def shapes(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The shapes that the features of such a call would have apart; no view is made."""
        shapes = shapes_of(leaves)
        rows = shapes[self.first + 1][1:]
        apart: list[Any] = []
        for size in leaves[self.first + 2].tolist():
            apart += [(size,), rows, (size,)]
        return [*shapes[: self.first], *apart, *shapes[self.first + 4 :]]


def shapes_of(leaves: Sequence[Any]) -> list[Any]:
    """The shapes of the tensors among ``leaves``."""
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

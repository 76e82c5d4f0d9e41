"""Sparse features: for each row of a batch, and for each feature, some indices of a table.

:class:`SparseFeatures` has two or three tensors for each feature. :class:`CombinedFeatures` has two
or three tensors for all features together. Both are pytrees, and mappings from names to features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree


@dataclass(frozen=True)
class Jagged:
    """One feature of a batch.

    - ``indices``: the indices of all rows, row after row; integers, one dimension.
    - ``lengths``: the number of indices of each row; integers, one dimension.
    - ``weights``: the weight of each index, or None.
    """

    indices: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None = None

    @property
    def offsets(self) -> torch.Tensor:
        """Return the position of each row's first index."""
        return self.lengths.cumsum(0) - self.lengths


class SparseFeatures(Mapping[str, Jagged]):
    """A mapping from names to features that have tensors of their own."""

    def __init__(self, features: Mapping[str, Jagged]) -> None:
        self._features = dict(features)

    def __getitem__(self, name: str) -> Jagged:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SparseFeatures:
        """Return the features with all tensors on ``device``.

        This takes two or three copies for each feature.
        """
        moved = {
            name: Jagged(*(t.to(device, non_blocking=non_blocking) for t in _tensors(jagged)))
            for name, jagged in self.items()
        }
        return SparseFeatures(moved)


class CombinedFeatures(Mapping[str, Jagged]):
    """The features of a batch in one tensor of indices and one of lengths.

    Args:
        names: the names of the features, in the order of the tensors.
        indices: the indices of all features, feature after feature.
        lengths: the number of indices of each feature (first dimension) and row (second dimension).
        splits: the number of indices of each feature, on the host, so that reading it waits for no
            device.
        weights: the weight of each index, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        indices: torch.Tensor,
        lengths: torch.Tensor,
        splits: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        self.names = tuple(names)
        self.indices, self.lengths, self.splits = indices, lengths, splits
        self.weights = weights
        self._apart: SparseFeatures | None = None

    def __getitem__(self, name: str) -> Jagged:
        # Split once and keep the result: N look-ups would otherwise split N times into N views.
        if self._apart is None:
            self._apart = self.separate()
        return self._apart[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def separate(self) -> SparseFeatures:
        """Return the features as views."""
        sizes = self.splits.tolist()
        indices, lengths = self.indices.split(sizes), self.lengths.unbind(0)
        weights: Sequence[Any] = [None] * len(sizes)
        if self.weights is not None:
            weights = self.weights.split(sizes)
        parts = zip(indices, lengths, weights, strict=True)
        return SparseFeatures(dict(zip(self.names, (Jagged(*p) for p in parts), strict=True)))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CombinedFeatures:
        """Return the features on ``device``.

        This takes two copies, or three with weights; ``splits`` stays on the host.
        """
        indices = self.indices.to(device, non_blocking=non_blocking)
        lengths = self.lengths.to(device, non_blocking=non_blocking)
        weights = self.weights
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
        return CombinedFeatures(self.names, indices, lengths, self.splits, weights)

    def pin_memory(self) -> CombinedFeatures:
        """Return the features in pinned memory; DataLoader calls this if ``pin_memory=True``."""
        indices, lengths = self.indices.pin_memory(), self.lengths.pin_memory()
        weights = None if self.weights is None else self.weights.pin_memory()
        return CombinedFeatures(self.names, indices, lengths, self.splits, weights)

    def to_keyed_jagged_tensor(self) -> Any:
        """Return a torchrec ``KeyedJaggedTensor`` that shares the tensors and has the splits.

        Raises:
            ImportError: torchrec is not installed.
        """
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor(
            keys=list(self.names),
            values=self.indices,
            lengths=self.lengths.reshape(-1),
            weights=self.weights,
            stride=self.lengths.shape[1],
            length_per_key=self.splits.tolist(),
        )

    @classmethod
    def of_keyed_jagged_tensor(cls, given: Any) -> CombinedFeatures:
        """Return the features of a torchrec ``KeyedJaggedTensor``, and share its tensors.

        Raises:
            ValueError: the features have different numbers of rows.
        """
        if given.variable_stride_per_key():
            raise ValueError("the features of the KeyedJaggedTensor have different numbers of rows")
        lengths = given.lengths().view(len(given.keys()), given.stride())
        splits = torch.tensor(given.length_per_key(), dtype=torch.int64)
        return cls(given.keys(), given.values(), lengths, splits, given.weights_or_none())


def _tensors(jagged: Jagged) -> Iterator[torch.Tensor]:
    yield from (t for t in (jagged.indices, jagged.lengths, jagged.weights) if t is not None)


def _flatten_separate(features: SparseFeatures) -> tuple[list[Any], Any]:
    return [t for j in features.values() for t in (j.indices, j.lengths, j.weights)], (
        tuple(features)
    )


def _unflatten_separate(leaves: Iterable[Any], names: Any) -> SparseFeatures:
    values = list(leaves)
    parts = [Jagged(*values[3 * i : 3 * i + 3]) for i in range(len(names))]
    return SparseFeatures(dict(zip(names, parts, strict=True)))


def _flatten_combined(features: CombinedFeatures) -> tuple[list[Any], Any]:
    tensors = [features.indices, features.lengths, features.splits, features.weights]
    return tensors, features.names


def _unflatten_combined(leaves: Iterable[Any], names: Any) -> CombinedFeatures:
    return CombinedFeatures(names, *leaves)


def _keys(flatten: Any) -> Any:
    def with_keys(features: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(features)
        return [(pytree.SequenceKey(i), leaf) for i, leaf in enumerate(leaves)], context

    return with_keys


for _kind, _flatten, _unflatten in (
    (SparseFeatures, _flatten_separate, _unflatten_separate),
    (CombinedFeatures, _flatten_combined, _unflatten_combined),
):
    pytree.register_pytree_node(
        _kind,
        _flatten,
        _unflatten,
        flatten_with_keys_fn=_keys(_flatten),
        serialized_type_name=f"tvmbridge.{_kind.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
    )

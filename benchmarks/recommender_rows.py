"""Batches of the DLRM by rows, and their redistribution to the ranks that have the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from examples.dlrm.clicks import Batch
from examples.dlrm.model import Sizes
from examples.dlrm.train import Place
from tvmbridge.fx.sparse_features import CombinedFeatures


def by_rank(sizes: Sizes, world: int) -> list[str]:
    """Return the names of the features, in the order of the ranks that have their tables."""
    return [name for rank in range(world) for name in sizes.of_rank(rank, world)]


def of_rows(whole: Batch, sizes: Sizes, place: Place) -> Batch:
    """Return this rank's rows of a whole batch, with all features in the order of the ranks."""
    rows = len(whole.labels) // place.world
    own = slice(place.rank * rows, (place.rank + 1) * rows)
    features, indices, lengths = whole.features.separate(), [], []
    names = by_rank(sizes, place.world)
    for name in names:
        per_row = features[name].indices.split(features[name].lengths.tolist())
        indices.append(torch.cat(per_row[own]))
        lengths.append(features[name].lengths[own])
    splits = torch.tensor([len(part) for part in indices])
    joined = CombinedFeatures(names, torch.cat(indices), torch.stack(lengths), splits)
    return Batch(whole.dense[own], whole.labels[own], joined)


@dataclass(frozen=True)
class Lengths:
    """A batch whose bag lengths are being sent.

    - ``received``: the lengths received, of shape (ranks, this rank's tables, rows).
    - ``request``: the pending all-to-all.
    """

    batch: Batch
    received: torch.Tensor
    request: Any


@dataclass(frozen=True)
class Indices:
    """A batch whose indices are being sent.

    - ``pieces``: the number of indices received, by rank and table.
    - ``received``: the indices; ``request``: the pending all-to-all.
    """

    lengths: Lengths
    pieces: torch.Tensor
    received: torch.Tensor
    request: Any


class Distribution:
    """Send the features of a rank's rows to the ranks that have the tables.

    A separate gloo group sends them on the host, so that no rank waits for a device.
    """

    def __init__(self, sizes: Sizes, place: Place) -> None:
        self.names = sizes.of_rank(place.rank, place.world)
        self.counts = [len(sizes.of_rank(rank, place.world)) for rank in range(place.world)]
        self.group = dist.new_group(backend="gloo")

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches by tables, from an endless iterator of batches by rows.

        While a batch is used, the indices of the next batch and the lengths of the one after it
        are being sent.
        """
        indices = self._indices(self._lengths(next(batches)))
        lengths = self._lengths(next(batches))
        while True:
            batch = self._joined(indices)
            indices, lengths = self._indices(lengths), self._lengths(next(batches))
            yield batch

    def _lengths(self, batch: Batch) -> Lengths:
        given = batch.features.lengths
        rows, own = given.shape[1], len(self.names)
        received = given.new_empty(len(self.counts), own, rows)
        sent = [count * rows for count in self.counts]
        request = dist.all_to_all_single(
            received.view(-1),
            given.view(-1),
            [own * rows] * len(self.counts),
            sent,
            group=self.group,
            async_op=True,
        )
        return Lengths(batch, received, request)

    def _indices(self, lengths: Lengths) -> Indices:
        lengths.request.wait()
        given = lengths.batch.features
        pieces = lengths.received.sum(2)
        counts = pieces.sum(1).tolist()
        received = given.indices.new_empty(sum(counts))
        sent = [int(part.sum()) for part in given.splits.split(self.counts)]
        request = dist.all_to_all_single(
            received, given.indices, counts, sent, group=self.group, async_op=True
        )
        return Indices(lengths, pieces, received, request)

    def _joined(self, indices: Indices) -> Batch:
        indices.request.wait()
        own, world, batch = len(self.names), len(self.counts), indices.lengths.batch
        parts = indices.received.split(indices.pieces.flatten().tolist())
        joined = torch.cat([parts[r * own + table] for table in range(own) for r in range(world)])
        lengths = indices.lengths.received.transpose(0, 1).reshape(own, -1)
        features = CombinedFeatures(self.names, joined, lengths, indices.pieces.sum(0))
        return Batch(batch.dense, batch.labels, features)

"""A seeded generator of clicks, with skewed indices and labels that a fixed model gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from examples.dlrm.model import Sizes
from tvmbridge.fx.collate import combine
from tvmbridge.fx.sparse_features import CombinedFeatures, Jagged


@dataclass(frozen=True)
class Batch:
    """The batch of one rank.

    - ``dense``, ``labels``: the dense features and labels of this rank's rows.
    - ``features``: the sparse features of this rank's tables, for the rows of all ranks.
    """

    dense: torch.Tensor
    labels: torch.Tensor
    features: CombinedFeatures

    def to(self, device: torch.device) -> Batch:
        """Return a copy on ``device`` without waiting; the features take two copies in all."""
        pinned = self.features.pin_memory() if device.type == "cuda" else self.features
        dense = self.dense.to(device, non_blocking=True)
        labels = self.labels.to(device, non_blocking=True)
        return Batch(dense, labels, pinned.to(device, non_blocking=True))


class Clicks:
    """Batches by number: each rank draws the rows of all ranks and keeps its own part.

    A bag has up to four indices, which follow Zipf's law. Each index and each dense feature has a
    fixed random weight; their sum gives the probability of a click.
    """

    def __init__(
        self, sizes: Sizes, rows: int, rank: int = 0, world: int = 1, seed: int = 0
    ) -> None:
        self.sizes, self.rows, self.rank, self.world, self.seed = sizes, rows, rank, world, seed
        hidden = torch.Generator().manual_seed(seed)
        self._weights = torch.randn(sizes.features, sizes.rows, generator=hidden)
        self._dense = torch.randn(sizes.dense, generator=hidden)
        ranks = torch.arange(1, sizes.rows + 1, dtype=torch.float64)
        self._chances = (ranks**-1.05).cumsum(0)
        self._chances /= self._chances[-1].clone()

    def __getitem__(self, number: int) -> Batch:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + number + 1)
        sizes, count = self.sizes, self.rows * self.world
        dense = torch.randn(count, sizes.dense, generator=draw)
        score = dense @ self._dense / sizes.dense**0.5
        names, kept = sizes.names(), set(sizes.of_rank(self.rank, self.world))
        features: dict[str, Jagged] = {}
        for index, name in enumerate(names):
            lengths = torch.randint(0, 5, (count,), generator=draw)
            total = int(lengths.sum())
            places = torch.rand(total, generator=draw, dtype=torch.float64)
            indices = torch.searchsorted(self._chances, places).clamp(max=sizes.rows - 1)
            bags = torch.repeat_interleave(torch.arange(count), lengths)
            found = torch.zeros(count).index_add(0, bags, self._weights[index][indices])
            score = score + found / sizes.features**0.5
            if name in kept:
                features[name] = Jagged(indices, lengths)
        labels = (torch.rand(count, generator=draw) < torch.sigmoid(2 * score)).float()
        own = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
        tables: Any = dict.fromkeys(features, sizes.rows)
        return Batch(dense[own], labels[own], combine(features, tables))

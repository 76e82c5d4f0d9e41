"""A DLRM as a plain PyTorch module, with its embedding tables sharded over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol

from tvmbridge.fx.sparse_features import Jagged


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    - ``features``: the number of sparse features, each with a table of ``rows`` rows.
    - ``width``: the width of an embedding; ``hidden``: of the hidden layers.
    - ``dense``: the number of dense features.
    """

    features: int = 26
    rows: int = 2000
    width: int = 16
    dense: int = 13
    hidden: int = 64

    def names(self) -> tuple[str, ...]:
        """Return the names of the sparse features."""
        return tuple(f"feature_{i}" for i in range(self.features))

    def of_rank(self, rank: int, world: int) -> tuple[str, ...]:
        """Return the names of the features whose tables are on ``rank``."""
        return self.names()[rank::world]


def perceptron(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """A model that predicts the clicks of this rank's rows.

    A rank looks up its own tables for the rows of all ranks. One all-to-all sends each row's
    embeddings to the rank that has the row. Each feature's embedding has its own LayerNorm.

    Args:
        sizes: the sizes of the model.
        rank: the rank of this process, which selects its tables.
        world: the number of processes.
    """

    def __init__(self, sizes: Sizes, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.sizes, self.rank, self.world = sizes, rank, world
        self.names = sizes.of_rank(rank, world)
        bags = {n: nn.EmbeddingBag(sizes.rows, sizes.width, mode="sum") for n in self.names}
        self.tables = nn.ModuleDict(bags)
        for table in bags.values():
            nn.init.normal_(table.weight, std=0.1)
        width = sizes.width
        self.bottom = perceptron(sizes.dense, sizes.hidden, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(sizes.features)])
        pairs = sizes.features * (sizes.features + 1) // 2
        self.top = perceptron(width + pairs, sizes.hidden, 1)
        rows, columns = torch.tril_indices(sizes.features + 1, sizes.features + 1, -1)
        self.register_buffer("pairs", rows * (sizes.features + 1) + columns, persistent=False)

    def forward(self, dense: torch.Tensor, features: Mapping[str, Jagged]) -> torch.Tensor:
        """Return the logits of this rank's rows.

        Args:
            dense: [rows, dense features].
            features: the features of this rank's tables, for the rows of all ranks.
        """
        bottom = self.bottom(dense)
        bags = [
            self.tables[name](features[name].indices, features[name].offsets) for name in self.names
        ]
        return self.interacted(bottom, self._exchanged(torch.cat(bags, 1), dense.shape[0]))

    def interacted(self, bottom: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows from the bottom network's output and the embeddings.

        Args:
            bottom: [rows, width].
            embedded: [rows, features * width], with the features in the order of the ranks.
        """
        parts = embedded.split(self.sizes.width, 1)
        normed = [torch.tanh(norm(part)) for norm, part in zip(self.norms, parts, strict=True)]
        joined = torch.cat([bottom, *normed], 1)
        stacked = joined.unflatten(1, (self.sizes.features + 1, self.sizes.width))
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        pairs = products.index_select(1, self.pairs)  # type: ignore[arg-type]
        logits: torch.Tensor = self.top(torch.cat([bottom, pairs], 1))
        return logits.squeeze(1)

    def _exchanged(self, own: torch.Tensor, rows: Any) -> torch.Tensor:
        """Exchange embeddings: this rank's features of all rows become all features of its rows."""
        if self.world == 1:
            return own
        width, group = self.sizes.width, dist.group.WORLD
        counts = [len(self.sizes.of_rank(r, self.world)) * width for r in range(self.world)]
        sent = [rows * len(self.names) * width] * self.world
        received = [rows * count for count in counts]
        flat = funcol.all_to_all_single_autograd(own.reshape(-1), received, sent, group)
        parts = flat.split(received)
        return torch.cat(
            [part.view(rows, count) for part, count in zip(parts, counts, strict=True)], 1
        )

    def replicated(self) -> list[nn.Parameter]:
        """Return the parameters that are equal on all ranks."""
        shared = (self.bottom, self.norms, self.top)
        return [p for module in shared for p in module.parameters()]

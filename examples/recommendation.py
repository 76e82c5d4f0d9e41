"""Train a DLRM: embedding bags, dot products of all feature pairs, and two MLPs."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

DENSE, SIZES, WIDTH, BATCH, STEPS, PER_BAG = 13, (100, 60, 40, 20), 8, 32, 20, 3


def perceptron(sizes: list[int], last: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


class DLRM(nn.Module):
    """A model that predicts clicks from dense features and bags of sparse features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = perceptron([DENSE, 32, WIDTH], nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, WIDTH, mode="sum") for size in SIZES)
        pairs = len(SIZES) * (len(SIZES) + 1) // 2
        self.top = perceptron([WIDTH + pairs, 32, 1], nn.Sigmoid())

    def forward(
        self, dense: torch.Tensor, offsets: torch.Tensor, indices: list[torch.Tensor]
    ) -> torch.Tensor:
        x = self.bottom(dense)
        bags = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
        features = torch.cat([x, *bags], dim=1).view(len(x), -1, WIDTH)
        products = torch.bmm(features, features.transpose(1, 2))
        count = features.shape[1]
        rows = torch.tensor([i for i in range(count) for _ in range(i)])
        columns = torch.tensor([j for i in range(count) for j in range(i)])
        result: torch.Tensor = self.top(torch.cat([x, products[:, rows, columns]], dim=1))
        return result


def batches(
    count: int,
) -> list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """Return random batches of features and clicks; all bags have ``PER_BAG`` indices."""
    g = torch.Generator().manual_seed(1)
    offsets = torch.arange(0, BATCH * PER_BAG, PER_BAG).repeat(len(SIZES), 1)
    return [
        (
            torch.rand(BATCH, DENSE, generator=g).log1p(),
            offsets,
            [torch.randint(0, size, (BATCH * PER_BAG,), generator=g) for size in SIZES],
            torch.rand(BATCH, 1, generator=g).round(),
        )
        for _ in range(count)
    ]


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """Return the losses of training, and the dispatch report."""
    torch.manual_seed(0)
    model = DLRM()
    if dispatch:
        add_tvm_dispatch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for dense, offsets, indices, clicks in batches(STEPS):
        loss = nn.functional.binary_cross_entropy(model(dense, offsets, indices), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])

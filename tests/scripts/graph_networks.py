"""Scripts with PyTorch Geometric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.script import Door, script

STEPS = 12


def _net(kind: str) -> nn.Module:
    from torch_geometric import nn as pyg

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "gin":
                self.first: Any = pyg.GINConv(nn.Sequential(nn.Linear(8, 16), nn.ReLU()))
                self.second: Any = pyg.GINConv(nn.Linear(16, 3))
            elif kind == "gat":
                self.first = pyg.GATConv(8, 4, heads=4, dropout=0.1)
                self.second = pyg.GATConv(16, 3, heads=1, concat=False)
            else:
                layer = {"gcn": pyg.GCNConv, "sage": pyg.SAGEConv}[kind]
                self.first, self.second = layer(8, 16), layer(16, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = F.relu(self.first(x, edge_index))
            x = F.dropout(x, p=0.5, training=self.training)
            return F.log_softmax(self.second(x, edge_index), dim=1)

    return Net()


def _graph(nodes: int, edges: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(nodes, 8), torch.randint(0, nodes, (2, edges)), torch.randint(0, 3, (nodes,))


def _one(door: Door, kind: str) -> Iterator[list[Any]]:
    model = door(_net(kind))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    x, edges, y = _graph(30, 90)
    for _ in range(STEPS):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, edges)[:20], y[:20])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            yield [loss, model(x, edges)]


def _changing(door: Door, kind: str) -> Iterator[list[Any]]:
    model = door(_net(kind))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for i in range(STEPS + 4):
        x, edges, y = _graph(20 + 3 * i % 11, 60 + 7 * i % 23)
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, edges), y)
        loss.backward()
        optimizer.step()
        yield [loss]


@script("torch_geometric")
def gcn(door: Door) -> Iterator[list[Any]]:
    yield from _one(door, "gcn")


@script("torch_geometric")
def gcn_changing(door: Door) -> Iterator[list[Any]]:
    yield from _changing(door, "gcn")


@script("torch_geometric")
def gat(door: Door) -> Iterator[list[Any]]:
    yield from _one(door, "gat")


@script("torch_geometric")
def gat_changing(door: Door) -> Iterator[list[Any]]:
    yield from _changing(door, "gat")


@script("torch_geometric")
def sage_changing(door: Door) -> Iterator[list[Any]]:
    yield from _changing(door, "sage")


@script("torch_geometric")
def gin_changing(door: Door) -> Iterator[list[Any]]:
    yield from _changing(door, "gin")


def _batches(door: Door, model: Any, call: Any) -> Iterator[list[Any]]:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    g = torch.Generator().manual_seed(1)
    graphs = []
    for i in range(32):
        n = 5 + i % 6
        edges = torch.randint(0, n, (2, 3 * n), generator=g)
        graphs.append(
            Data(x=torch.randn(n, 8, generator=g), edge_index=edges, y=torch.tensor(i % 3))
        )
    model = door(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch in DataLoader(graphs, batch_size=5, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(model, batch), batch.y)
            loss.backward()
            optimizer.step()
            yield [loss]


def _pooled(how: str) -> nn.Module:
    from torch_geometric import nn as pyg
    from torch_geometric.utils import to_dense_batch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.GINConv(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()))
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            x = self.conv(x, edge_index)
            if how == "pool":
                x = pyg.global_mean_pool(x, batch) + pyg.global_max_pool(x, batch)
                return self.head(x + 0 * pyg.global_add_pool(x, torch.arange(len(x))))
            dense, mask = to_dense_batch(x, batch)
            h = dense.masked_fill(~mask[..., None], -1e9).max(1)[0]
            return self.head(h)

    return Net()


@script("torch_geometric")
def graph_pooling(door: Door) -> Iterator[list[Any]]:
    yield from _batches(door, _pooled("pool"), lambda m, b: m(b.x, b.edge_index, b.batch))


@script("torch_geometric")
def dense_batch(door: Door) -> Iterator[list[Any]]:
    yield from _batches(door, _pooled("dense"), lambda m, b: m(b.x, b.edge_index, b.batch))


@script("torch_geometric")
def graph_data_given(door: Door) -> Iterator[list[Any]]:
    """A forward that takes a Data object, as most of PyG's examples do."""
    inner = _pooled("pool")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, data: Any) -> Tensor:
            return self.inner(data.x, data.edge_index, data.batch)

    yield from _batches(door, Outer(), lambda m, b: m(b))

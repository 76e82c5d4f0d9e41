"""DistributedDataParallel in two processes on CPUs; each process trains on its part of the data."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from examples.doors import Report, opened, served

PROCESSES, FEATURES, CLASSES, BATCH, EPOCHS = 2, 16, 4, 8, 3


class Classifier(nn.Module):
    """A small classifier.

    It has its own class because Dynamo skips the forward of a torch.nn class that DDP wraps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (96,), generator=generator))


def train(rank: int, port: int, door: str, epochs: int, results: Any) -> None:
    """Train in the process ``rank``; put its losses and report into ``results``."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    model = Classifier()
    if door == "dispatch":
        opened(model, door)
    parallel: Any = DistributedDataParallel(model)
    if door == "compile":
        parallel = opened(parallel, door)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    sampler: Any = DistributedSampler(data(), shuffle=True)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, labels in DataLoader(data(), batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    results[rank] = losses, served(model, door) if door else None
    dist.destroy_process_group()


def main(
    dispatch: bool = True, door: str = "dispatch", epochs: int = EPOCHS
) -> tuple[list[float], Report | None]:
    """Return the losses of both processes, and the report that has the smaller served share."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        arguments = port, door if dispatch else "", epochs, results
        torch.multiprocessing.spawn(train, arguments, nprocs=PROCESSES)
        (first, report), (second, other) = results[0], results[1]
    if report is not None and other.share < report.share:
        report = other
    return [*first, *second], report


if __name__ == "__main__":
    print(main()[1])

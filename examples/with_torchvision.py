"""torchvision: train one of its models by the loop of its reference scripts, with a warm-up."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import get_model

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

SIZE, CLASSES, BATCH, EPOCHS = 48, 10, 8, 2


def data(rows: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    pictures = torch.randn(rows, 3, SIZE, SIZE, generator=g)
    return TensorDataset(pictures, torch.randint(0, CLASSES, (rows,), generator=g))


def train_one_epoch(
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[torch.Tensor, ...]],
) -> list[float]:
    model.train()
    losses = []
    for image, target in loader:
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(
    model: nn.Module, criterion: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]
) -> list[float]:
    model.eval()
    with torch.inference_mode():
        return [criterion(model(image), target).item() for image, target in loader]


def main(
    dispatch: bool = True, name: str = "resnet18"
) -> tuple[list[float], DispatchReport | None]:
    """Return the losses of training and evaluation, and the dispatch report."""
    torch.manual_seed(0)
    model = get_model(name, num_classes=CLASSES)
    if dispatch:
        add_tvm_dispatch(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    training = DataLoader(data(48, seed=1), batch_size=BATCH, shuffle=True)
    testing = DataLoader(data(24, seed=2), batch_size=BATCH)
    losses = []
    for _ in range(EPOCHS):
        losses += train_one_epoch(model, criterion, optimizer, training)
        warmup.step()
        losses += evaluate(model, criterion, testing)
    return losses, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])

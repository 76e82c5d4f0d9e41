"""A training loop with accelerate, which accumulates, clips and synchronises gradients."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.doors import Report, opened, served

FEATURES, CLASSES, BATCH, EPOCHS = 16, 4, 8, 3


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (rows,), generator=generator))


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 64),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, CLASSES),
    )


def main(
    dispatch: bool = True,
    mixed_precision: str = "no",
    door: str = "dispatch",
    epochs: int = EPOCHS,
) -> tuple[list[float], Report | None]:
    """Return the losses of training and evaluation, and the report of the served calls."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
    )
    model = classifier()
    if dispatch:
        model = opened(model, door)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    training = DataLoader(data(96), batch_size=BATCH, shuffle=True)
    testing = DataLoader(data(32), batch_size=BATCH)
    model, optimizer, training, testing, scheduler = accelerator.prepare(
        model, optimizer, training, testing, scheduler
    )
    losses = []
    for _ in range(epochs):
        model.train()
        for x, labels in training:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        scheduler.step()
        model.eval()
        for x, labels in testing:
            with torch.no_grad():
                logits, labels = accelerator.gather_for_metrics((model(x), labels))
            losses.append(nn.functional.cross_entropy(logits, labels).item())
    found = served(accelerator.unwrap_model(model), door) if dispatch else None
    accelerator.free_memory()
    return losses, found


if __name__ == "__main__":
    print(main()[1])

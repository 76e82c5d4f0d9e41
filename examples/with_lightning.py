"""Lightning: a LightningModule, and a Trainer that trains and validates it."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.doors import Report, opened, served

FEATURES, CLASSES, BATCH, EPOCHS = 16, 4, 8, 3


class Classifier(lightning.LightningModule):
    """A LightningModule that calls ``self.model`` in its steps, as in Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 64, bias=False),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, CLASSES),
        )
        self.losses: list[float] = []

    def _loss(self, batch: list[torch.Tensor], name: str) -> torch.Tensor:
        x, labels = batch
        loss = nn.functional.cross_entropy(self.model(x), labels)
        self.log(name, loss)
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self._loss(batch, "train_loss")

    def validation_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self._loss(batch, "val_loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (rows,), generator=generator))


def main(
    dispatch: bool = True,
    precision: Any = "32-true",
    door: str = "dispatch",
    epochs: int = EPOCHS,
) -> tuple[list[float], Report | None]:
    """Return the losses of training and validation, and the report of the served calls."""
    lightning.seed_everything(0, verbose=False)
    module = Classifier()
    if dispatch:
        module.model = opened(module.model, door)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        precision=precision,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(data(96), batch_size=BATCH, shuffle=True),
        DataLoader(data(32), batch_size=BATCH),
    )
    return module.losses, served(module.model, door) if dispatch else None


if __name__ == "__main__":
    print(main()[1])

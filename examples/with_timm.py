"""timm: train one of its models with its loss, optimizer, scheduler and averaged weights."""

from __future__ import annotations

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

SIZE, CLASSES, BATCH, EPOCHS, BATCHES = 48, 10, 8, 2, 6


def images(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(BATCH, 3, SIZE, SIZE, generator=g),
            torch.randint(0, CLASSES, (BATCH,), generator=g),
        )
        for _ in range(count)
    ]


def main(
    dispatch: bool = True, name: str = "resnet10t"
) -> tuple[list[float], DispatchReport | None]:
    """Return the losses of training and evaluation, and the dispatch report."""
    timm.utils.random_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, drop_rate=0.1)
    if dispatch:
        add_tvm_dispatch(model)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1e-3, weight_decay=1e-4)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=EPOCHS, warmup_epochs=1)
    average = ModelEmaV3(model, decay=0.9)
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=CLASSES)
    criterion = SoftTargetCrossEntropy()
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for pictures, labels in images(BATCHES, seed=1):
            mixed, targets = mixup(pictures, labels)
            loss = criterion(model(mixed), targets)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), value=1.0)
            optimizer.step()
            average.update(model)
            losses.append(loss.item())
        scheduler.step(epoch + 1)
        for evaluated in (model, average.module):
            evaluated.eval()
            with torch.inference_mode():
                for pictures, labels in images(4, seed=2):
                    logits = evaluated(pictures)
                    losses.append(torch.nn.functional.cross_entropy(logits, labels).item())
    return losses, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])

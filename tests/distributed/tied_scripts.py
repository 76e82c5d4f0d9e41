"""Functions that ranks run on a model whose head shares the embedding's weight."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.models import Language, cross_entropy, tokens
from tvmbridge.distributed import pipeline


def _runner(model: Language) -> Any:
    return pipeline(
        model.double().train(), tokens()[0], microbatches=4, loss=cross_entropy, timeout=30,
        tvm=False,
    )  # fmt: skip


def other_weights(rank: int) -> None:
    """Build a pipeline whose second rank has other weights."""
    torch.manual_seed(rank)
    _runner(Language(tied=True))


def frozen(rank: int) -> list[str]:
    """Freeze the shared weight and run a step; return the names of parameters with a gradient."""
    torch.manual_seed(0)
    model = Language(tied=True)
    model.embedding.requires_grad_(False)
    runner = _runner(model)
    assert len(runner.plan.tied) == 1
    runner.step(*tokens())
    return [name for name, p in runner.named_parameters() if p.grad is not None]

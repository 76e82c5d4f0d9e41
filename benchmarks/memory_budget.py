"""Training steps under ``memory_budget``: residuals over the budget, and time over the prediction.

Blocks of a Llama and of BERT, and a convolutional network, each with four budgets, in turns. With
a GPU everything is in bfloat16. The prediction and the time are both over those of a budget of 1.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.common import Row, alternate, parser, report
from benchmarks.data_parallel import EncoderBlock
from examples.pretrain import Block
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.coloring.budget import Recomputation

BUDGETS = (1.0, 0.7, 0.5, 0.3)


class Rotated(nn.Module):
    """Llama blocks with the tables of their rotary positions."""

    def __init__(self, width: int, length: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(32) / 32)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def convolutions(width: int, layers: int) -> nn.Module:
    parts = [
        part
        for _ in range(layers)
        for part in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU())
    ]
    return nn.Sequential(*parts)


def models(large: bool) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    width, length, batch = (1024, 1024, 8) if large else (128, 64, 2)
    x = torch.randn(batch, length, width)
    encoder = nn.Sequential(*(EncoderBlock(width) for _ in range(4)))
    images = torch.randn(batch * 4, width // 16, 56, 56) if large else torch.randn(2, 8, 24, 24)
    return {
        "Llama blocks": (Rotated(width, length, 4), x),
        "BERT blocks": (encoder, x),
        "convolutions": (convolutions(images.shape[1], 6), images),
    }


def rows_of(name: str, plain: nn.Module, x: torch.Tensor, rounds: int) -> Iterator[Row]:
    """Measure one model, a copy of ``plain`` for each budget."""
    steps, choices = [], list[Recomputation]()
    for budget in BUDGETS:
        module = copy.deepcopy(plain).train()
        options = {"memory_budget": budget, "only_if_faster": False}
        add_tvm_dispatch(module, (x,), options=options)
        steps.append(partial(_step, module, x))
        steps[-1]()
        (made,) = dispatch_report(module).specializations
        assert made.recomputation is not None
        assert made.residual_bytes == made.recomputation.kept_bytes
        choices.append(made.recomputation)
    whole, *times = alternate(steps, rounds=rounds, warmup=5)
    for budget, choice, seconds in zip(BUDGETS[1:], choices[1:], times, strict=True):
        share = choice.kept_bytes / choice.full_bytes
        yield Row(f"{name}, budget {budget}: share kept", share, "", budget)
        ratio = seconds / whole
        yield Row(f"{name}, budget {budget}: step over that of budget 1", ratio)
        yield Row(f"{name}, budget {budget}: of the prediction", ratio / choice.predicted, "", 1.1)


def _step(module: nn.Module, x: torch.Tensor) -> None:
    module.zero_grad(set_to_none=True)
    module(x).float().square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", help="parts of names")
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    torch.manual_seed(0)
    large = torch.cuda.is_available()
    placed = {"device": "cuda", "dtype": torch.bfloat16} if large else {}
    rows: list[Row] = []
    for name, (module, x) in models(large).items():
        if options.models and not any(part in name for part in options.models):
            continue
        module.to(**placed)
        rows += rows_of(name, module, x.to(**placed), options.rounds)
    return report("Memory budgets", rows, check=not options.no_check)


if __name__ == "__main__":
    sys.exit(main())

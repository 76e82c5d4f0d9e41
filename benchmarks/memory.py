"""Memory of the process over 1,000 training steps of a small block, which must not grow."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import psutil
import torch
from torch import nn

from benchmarks.common import Row, parser, report
from tvmbridge import add_tvm_dispatch, dispatch_report

BOUND = 1.01


def block() -> nn.Module:
    """Return a block of Linear, GELU, dropout and LayerNorm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.LayerNorm(64)
    ).train()


def resident() -> int:
    """Return the resident bytes of the process."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def main(argv: Sequence[str] = ()) -> int:
    """Train, and compare the memory after step 100 with the memory at the end."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=1000)
    chosen = options.parse_args(list(argv))
    module, x = block(), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(module.parameters())
    add_tvm_dispatch(module, x)
    early = 0
    for number in range(1, chosen.steps + 1):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        if number == 100:
            early = resident()
    late = resident()
    seen = dispatch_report(module)
    assert seen.tvm_calls == chosen.steps, seen.fallbacks
    rows = [
        Row("after step 100", early / 2**20, "MiB"),
        Row(f"after step {chosen.steps}", late / 2**20, "MiB"),
        Row("ratio", late / early if early else float("nan"), "", BOUND),
    ]
    return report("resident memory in training", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

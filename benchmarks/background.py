"""Training with changing sizes: compiled at the call, compiled in the background, and eager.

``python -m benchmarks.background [--steps 300]`` runs each way in its own process: first with an
empty cache, then with the cache that the first run left. It prints total seconds, the longest step,
the first step served, the share served, and the median of the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tvmbridge import add_tvm_dispatch, dispatch_report

WAYS = ("eager", "at the call", "background")


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        projected = self.project(self.norms[0](x)).view(rows, length, 3, 4, width // 4)
        q, k, v = projected.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.dropout(self.out(attended.reshape(rows, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))))


def run(way: str, steps: int) -> dict[str, Any]:
    """Train for ``steps`` steps on sequences of changing length; return the figures by name."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(4))).train()
    if way != "eager":
        budget = None if way == "at the call" else 0.0
        add_tvm_dispatch(model, dynamic_shapes="auto", budget=budget)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    lengths = torch.randint(6, 48, (steps,)).tolist()
    seconds, served, first = [], 0, None
    for step, length in enumerate(lengths):
        x = torch.randn(8, length, 128)
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        calls = 0 if way == "eager" else model.forward.code.served()
        first = step if first is None and calls > served else first
        served = calls
    share = 0.0 if way == "eager" else dispatch_report(model).share
    return {
        "seconds": sum(seconds),
        "longest": max(seconds),
        "served from step": first,
        "share": share,
        "median ms": 1e3 * statistics.median(seconds[-steps // 4 :]),
    }


def main() -> None:
    """Run each way in its own process and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(run(given.way, given.steps)))
        return
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm") if way != "eager" else ("",):
                command = [sys.executable, "-m", "benchmarks.background"]
                command += ["--way", way, "--steps", str(given.steps)]
                environment = {**os.environ, "TVMBRIDGE_CACHE_DIR": folder}
                said = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, text=True, check=True
                ).stdout
                found = json.loads(said.splitlines()[-1])
                figures = ", ".join(
                    f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()
                )
                print(f"{way:12} {cache:5} {figures}", flush=True)


if __name__ == "__main__":
    main()

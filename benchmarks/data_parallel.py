"""A training step under DDP and under FSDP2, beside eager PyTorch and torch.compile.

``torchrun --nproc-per-node 2 -m benchmarks.data_parallel`` needs GPUs. With ``--small`` it runs
toys on CPUs, to try the script. Candidates take turns; a step takes as long as on its slowest rank.
``--rows equal`` compares losses and weights with eager PyTorch, on CPUs as well.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tvmbridge
from benchmarks.common import Row, parser, report
from benchmarks.data_parallel_equal import STRATEGIES, equal
from benchmarks.pipeline_common import wait
from benchmarks.pipeline_start import measured
from examples.pretrain import Llama, loss_of

KINDS = ("eager", "torch.compile", "tvmbridge")


@dataclass
class Candidate:
    """One way to run a training step.

    - ``dispatched``: a module that tvmbridge serves, if any.
    - ``run``: runs a step; its argument says whether DDP exchanges gradients.
    """

    dispatched: nn.Module | None
    run: Callable[[bool], torch.Tensor]


def seconds(candidates: dict[str, Candidate], rounds: int, exchange: bool) -> dict[str, float]:
    """Return the median seconds of a step of each candidate, in turns."""
    taken: dict[str, list[float]] = {kind: [] for kind in candidates}
    for _ in range(rounds):
        for kind, candidate in candidates.items():
            wait()
            dist.barrier()
            start = time.perf_counter()
            candidate.run(exchange)
            wait()
            slowest = torch.tensor(time.perf_counter() - start, device=_device())
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            taken[kind].append(float(slowest))
    return {kind: statistics.median(each) for kind, each in taken.items()}


def warmed_up(kinds: Sequence[str], make: Callable[[str], Candidate]) -> dict[str, Candidate]:
    """Make the candidates, and run steps of each until all graphs are captured.

    A candidate that fails on any rank is left out, and rank 0 prints each rank's error.
    """
    made = {}
    for kind in kinds:
        try:
            candidate, error = _warmed_up(kind, make), ""
        except Exception as failure:
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
        if not any(errors := _of_all_ranks(error)):
            made[kind] = candidate
        elif dist.get_rank() == 0:
            print(f"{kind} is left out:", *errors, sep="\n", flush=True)
    return made


def _warmed_up(kind: str, make: Callable[[str], Candidate]) -> Candidate:
    start = time.perf_counter()
    candidate = make(kind)
    losses = [float(candidate.run(True)) for _ in range(6)]
    for _ in range(6):
        candidate.run(False)
    took = time.perf_counter() - start
    # A figure before the other candidates are there, in case the run is cut off.
    alone = seconds({kind: candidate}, 5, exchange=True)[kind]
    if dist.get_rank() == 0:
        seen = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{kind}: {took:.0f} s, then {alone * 1e3:.4g} ms a step; losses {seen}", flush=True)
        if candidate.dispatched is not None:
            print(tvmbridge.dispatch_report(candidate.dispatched), flush=True)
    return candidate


def _of_all_ranks(value: str) -> list[str]:
    """Return each rank's value, exchanged on the CPU: a GPU may have failed."""
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, value, group=_control())
    return found


@functools.cache
def _control() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=60))


def ddp(options: argparse.Namespace) -> Iterator[Row]:
    """Measure an encoder of BERT-large's shape, 32 sequences of 128 tokens, in bfloat16."""
    candidates = warmed_up(options.peers, lambda kind: _encoder(kind, options.small))
    whole = seconds(candidates, options.rounds, exchange=True)
    alone = seconds(candidates, options.rounds, exchange=False)
    for kind in candidates:
        yield Row(f"DDP, {kind}: step", whole[kind] * 1e3, "ms")
        yield Row(f"DDP, {kind}: exposed exchange", (whole[kind] - alone[kind]) * 1e3, "ms")
    if len(candidates) == len(KINDS):
        least = min(whole["eager"], whole["torch.compile"])
        yield Row("DDP, step over the better of both", whole["tvmbridge"] / least, "", 0.9)
        exposed = {kind: whole[kind] - alone[kind] for kind in KINDS}
        over = exposed["tvmbridge"] / exposed["eager"]
        yield Row("DDP, exposed exchange over eager's", over, "", 1.0)


class Encoder(nn.Module):
    """BERT's encoder with tied weights of the words; returns the loss of predicting ``labels``."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.words(words) + self.places.weight[: words.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = self.norms[1](F.gelu(self.head(x)))
        return loss_of(F.linear(x, self.words.weight, self.bias), labels)


class EncoderBlock(nn.Module):
    """A layer of BERT: attention and an MLP, each with dropout and a norm behind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        *projections, out = self.projections
        q, k, v = (p(x).view(batch, length, self.heads, -1).transpose(1, 2) for p in projections)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = self.norms[0](x + F.dropout(out(y), 0.1, self.training))
        return self.norms[1](x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training))


def _encoder(kind: str, small: bool) -> Candidate:
    words, width, layers, batch, length = (
        (500, 64, 2, 4, 16) if small else (30_522, 1024, 24, 32, 128)
    )
    torch.manual_seed(0)
    device = _device()
    model = Encoder(words, width, layers).to(device).train()
    if kind == "tvmbridge":
        tvmbridge.add_tvm_dispatch(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    called = torch.compile(parallel) if kind == "torch.compile" else parallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (2, batch, length)
    given, labels = torch.randint(words, shape, generator=generator).to(device)

    def run(exchange: bool) -> torch.Tensor:
        with nullcontext() if exchange else parallel.no_sync():
            with torch.autocast(device.type, torch.bfloat16):
                loss: torch.Tensor = called(given, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Candidate(model if kind == "tvmbridge" else None, run)


def fsdp(options: argparse.Namespace) -> Iterator[Row]:
    """Measure a Llama of a billion weights, each block sharded, 4 sequences of 2,048 tokens."""
    candidates = warmed_up(options.peers, lambda kind: _llama(kind, options.small, False))
    whole = seconds(candidates, options.rounds, exchange=True)
    for kind in candidates:
        yield Row(f"FSDP2, {kind}: step", whole[kind] * 1e3, "ms")
    for other, bound in (("eager", 0.8), ("torch.compile", 0.97)):
        if other in whole and "tvmbridge" in whole:
            ratio = whole["tvmbridge"] / whole[other]
            yield Row(f"FSDP2, step over {other}", ratio, "", bound)


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the peak memory of a step of the same Llama with checkpointed blocks."""
    peaks = {}
    for kind in options.peers:
        # Modules are in reference cycles: free those of the candidates before.
        gc.collect()
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        candidates = warmed_up((kind,), lambda kind: _llama(kind, options.small, True))
        if torch.cuda.is_available() and candidates:
            torch.cuda.reset_peak_memory_stats()
            candidates[kind].run(True)
            wait()
            peaks[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
            yield Row(f"FSDP2 with checkpointing, {kind}: peak", peaks[kind], "MiB")
        candidates.clear()
    if {"eager", "tvmbridge"} <= peaks.keys():
        over = peaks["tvmbridge"] / peaks["eager"]
        yield Row("FSDP2 with checkpointing, peak over eager's", over, "", 1.0)


def _llama(kind: str, small: bool, checkpointing: bool) -> Candidate:
    words, width, layers, batch, length = (
        (500, 64, 2, 2, 16) if small else (32_000, 2048, 16, 4, 2048)
    )
    torch.manual_seed(0)
    device = _device()
    model = Llama(words, width, layers, width // 64, checkpointing).to(device).train()
    for block in model.blocks:
        if kind == "tvmbridge":
            tvmbridge.add_tvm_dispatch(block)
        elif kind == "torch.compile":
            block.compile()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = torch.randint(words, (batch, length + 1), generator=generator).to(device)

    def run(exchange: bool) -> torch.Tensor:
        loss = loss_of(model(given[:, :-1]), given[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Candidate(model.blocks[0] if kind == "tvmbridge" else None, run)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


ROWS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "memory": memory,
    "equal": equal,
}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    arguments.add_argument("--peers", nargs="+", choices=KINDS, default=KINDS)
    arguments.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--small", action="store_true")
    options = arguments.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(_device())
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rows = [row for name in options.rows for row in measured(name, ROWS[name], options)]
    status = 0
    if dist.get_rank() == 0:
        status = report("Data parallel", rows, check=not options.no_check)
    gc.collect()  # DistributedDataParallel must not outlive the process group
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())

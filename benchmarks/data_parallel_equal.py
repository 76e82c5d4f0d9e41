"""The row ``equal`` of ``benchmarks.data_parallel``: training through TVM against eager PyTorch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tvmbridge
from benchmarks.common import Row
from examples.pretrain import Llama

STEPS = 20
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
STRATEGIES = ("fsdp", "ddp", "tensor")
_WORDS = 64


def equal(options: argparse.Namespace) -> Iterator[Row]:
    """Compare losses and weights after 20 steps with eager PyTorch under the same strategy.

    Under tensor parallel the MLPs are split over the ranks, by columns and then by rows.
    """
    before = torch.get_float32_matmul_precision()
    # TF32 rounds the operands of products to 11 bits, in eager PyTorch too.
    torch.set_float32_matmul_precision("highest")
    try:
        yield from _compared(options.strategies)
    finally:
        torch.set_float32_matmul_precision(before)


def _compared(strategies: Sequence[str]) -> Iterator[Row]:
    ranks = dist.get_world_size()
    for strategy in strategies:
        for dtype, bound in BOUNDS.items():
            eager, _ = _trained(strategy, dtype, tvm=False)
            ours, served = _trained(strategy, dtype, tvm=True)
            errors = []
            for a, b in zip(eager, ours, strict=True):
                errors.append(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)))
            name = f"{strategy}, {ranks} ranks, {str(dtype)[6:]}"
            worst = _largest(max(errors))
            yield Row(f"{name}: losses and weights after {STEPS} steps", worst, "relative", bound)
            yield Row(f"{name}: calls that no compiled code served", _largest(1 - served), "", 0.0)


def _largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64, device=_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _trained(strategy: str, dtype: torch.dtype, *, tvm: bool) -> tuple[list[torch.Tensor], float]:
    """Train a small Llama; return its losses and weights, and the share of compiled calls."""
    torch.manual_seed(0)
    device = _device()
    model = Llama(_WORDS, 64, 2, 2, checkpointing=False).to(device, dtype).train()
    parts: list[nn.Module] = list(model.blocks)
    for part in parts if tvm else ():
        tvmbridge.add_tvm_dispatch(part, options={"only_if_faster": False})
    parallel = _distributed(model, strategy, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    # Under tensor parallel all ranks work on one batch.
    rank = 0 if strategy == "tensor" else dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(_WORDS, (2, 17), generator=generator).to(device)
        loss = F.cross_entropy(parallel(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if strategy != "tensor":  # PyTorch clips no DTensors together with plain tensors
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    reports = [tvmbridge.dispatch_report(part) for part in parts] if tvm else []
    calls = sum(report.tvm_calls + sum(report.fallbacks.values()) for report in reports)
    served = sum(report.tvm_calls for report in reports) / max(1, calls)
    return [torch.stack(losses), *weights], served


def _distributed(model: Llama, strategy: str, device: torch.device) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    if strategy == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    if strategy == "tensor":
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
        return model
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))

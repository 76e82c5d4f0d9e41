"""Pretrain a Llama on generated text over several processes, and resume.

    torchrun --nproc-per-node 2 -m examples.pretrain --strategy fsdp
    torchrun --nproc-per-node 2 -m examples.pretrain --strategy ddp --eager
    torchrun --nproc-per-node 2 -m examples.pretrain --strategy pipeline

With FSDP2 and DDP each block is dispatched separately. FSDP can then gather a block's parameters
just before the block runs, and DDP can send its gradients while earlier blocks still compute
theirs. A pipeline cuts the model into one stage for each process. With ``--folder`` a checkpoint is
written every ``--every`` steps, and a later run resumes from it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import tvmbridge


class Block(nn.Module):
    """A Llama block: attention with rotary positions and a gated MLP, each after an RMS norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Llama(nn.Module):
    """A decoder of ``layers`` blocks over ``words`` tokens.

    With ``checkpointing`` backward recomputes each block's forward.
    """

    def __init__(
        self, words: int, width: int, layers: int, heads: int, checkpointing: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.half = width // heads // 2
        self.checkpointing = checkpointing

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(words.shape[1], device=words.device, dtype=torch.float32)
        steps = torch.arange(self.half, device=words.device, dtype=torch.float32)
        angles = positions[:, None] * 10_000.0 ** (-steps / self.half)
        x = self.embedding(words)
        # FSDP would cast them before a block runs, but not before a checkpoint repeats it.
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = recomputed(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def batches(options: argparse.Namespace, first: int, device: torch.device) -> Iterator[Any]:
    """Yield this rank's batches from step ``first`` on: sequences that count by one to five.

    The ranks of a pipeline get the same batches.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if options.strategy == "pipeline":
        size, rank = 1, 0
    for step in range(first, options.steps):
        generator = torch.Generator().manual_seed(step * size + rank)
        shape = (options.batch, 1)
        start = torch.randint(0, options.words, shape, generator=generator)
        stride = torch.randint(1, 6, shape, generator=generator)
        counted = start + stride * torch.arange(options.length + 1)
        yield step, (counted % options.words).to(device)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Replicas:
    """The whole model on each rank, by FSDP2 or DDP."""

    def __init__(self, model: Llama, options: argparse.Namespace, device: torch.device) -> None:
        self.plain, self.device = model, device
        # FSDP has its own policy.
        self.half = options.autocast and options.strategy == "ddp"
        self.compiled = [] if options.eager else list(model.blocks)
        for block in self.compiled:
            tvmbridge.add_tvm_dispatch(block)
        self.model = self._distributed(options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate)

    def _distributed(self, options: argparse.Namespace) -> Any:
        if options.strategy == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(self.plain)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = dist.device_mesh.init_device_mesh(self.device.type, (dist.get_world_size(),))
        half = torch.bfloat16 if options.autocast else None
        policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=torch.float32 if half else None
        )
        for part in (*self.plain.blocks, self.plain):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return self.plain

    def backward(self, words: torch.Tensor) -> float:
        """Compute the clipped gradients of a batch; return its loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = loss_of(self.model(words[:, :-1]), words[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return float(loss.detach())

    def save(self, folder: str) -> None:
        weights, states = get_state_dict(self.plain, self.optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        weights, states = get_state_dict(self.plain, self.optimizer)
        state = {"model": weights, "optimizer": states}
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(
            self.plain,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def report(self) -> Any:
        return tvmbridge.dispatch_report(self.compiled[0]) if self.compiled else ""


class Stages:
    """One stage of the model on each rank."""

    def __init__(self, model: Llama, options: argparse.Namespace, words: torch.Tensor) -> None:
        from tvmbridge.distributed import pipeline

        if options.autocast or options.checkpointing:
            raise SystemExit("a pipeline runs without --autocast and --checkpointing")
        self.runner = pipeline(
            model.train(),
            words[:, :-1],
            microbatches=options.microbatches,
            loss=loss_of,
            tvm=not options.eager,
        )
        self.optimizer = torch.optim.AdamW(self.runner.parameters(), lr=options.rate)

    def backward(self, words: torch.Tensor) -> float:
        """Compute the clipped gradients of a batch; return its loss."""
        losses = self.runner.step(words[:, :-1], words[:, 1:])
        self.runner.clip_grad_norm_(1.0)
        return float(losses.mean())

    def save(self, folder: str) -> None:
        from tvmbridge.distributed import save_checkpoint

        save_checkpoint(self.runner, folder, self.optimizer)

    def load(self, folder: str) -> None:
        from tvmbridge.distributed import load_checkpoint

        load_checkpoint(self.runner, folder, self.optimizer)

    def report(self) -> Any:
        return self.runner.report()


def train(options: argparse.Namespace) -> list[float]:
    """Train on this rank, and return its losses; the caller destroys the process group.

    DistributedDataParallel, which is freed on return, must not outlive the group.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    model = Llama(
        options.words, options.width, options.layers, options.heads, options.checkpointing
    ).to(device)
    trained: Replicas | Stages
    if options.strategy == "pipeline":
        _, sample = next(batches(options, options.steps - 1, device))
        trained = Stages(model, options, sample)
    else:
        trained = Replicas(model, options, device)
    first = _last_step(options.folder)
    if first:
        trained.load(str(Path(options.folder, str(first))))
    losses, began = [], time.perf_counter()
    for step, words in batches(options, first, device):
        losses.append(trained.backward(words))
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        if step + 1 == first + options.warmup:
            began = time.perf_counter()
        if options.folder and (step + 1) % options.every == 0:
            trained.save(str(Path(options.folder, str(step + 1))))
    seconds = time.perf_counter() - began
    report = trained.report()  # Of a pipeline, all ranks make it together.
    if dist.get_rank() == 0:
        timed = len(losses) - options.warmup
        replicas = 1 if options.strategy == "pipeline" else dist.get_world_size()
        tokens = timed * options.batch * options.length * replicas
        speed = f"{tokens / seconds:,.0f} tokens a second" if timed > 0 else "too short to time"
        print(f"steps {first} to {options.steps}, loss {losses[-1]:.4f}, {speed}")
        print(report)
    return losses


def _last_step(folder: str | None) -> int:
    """Return the number of steps of the last complete checkpoint; 0: there is none."""
    found = Path(folder).glob("*/.metadata") if folder else ()
    return max((int(p.parent.name) for p in found if p.parent.name.isdigit()), default=0)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse ``given``, or the command line if it is None."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", choices=("fsdp", "ddp", "pipeline"), default="fsdp")
    parser.add_argument("--eager", action="store_true", help="leave the blocks to eager PyTorch")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--checkpointing", action="store_true", help="recompute blocks in backward")
    parser.add_argument("--folder", help="where checkpoints are written and looked for")
    for name, value in {
        "steps": 30, "batch": 4, "length": 64, "words": 128, "width": 128, "layers": 4,
        "heads": 4, "every": 10, "warmup": 5, "microbatches": 4,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=3e-3, help="of the optimizer")
    return parser.parse_args(given)


if __name__ == "__main__":
    train(arguments())
    dist.destroy_process_group()

"""Functions that ranks run: training under ``fully_shard``, with dispatched blocks and in eager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from tvmbridge import add_tvm_dispatch, dispatch_report

_WIDTH = 16
_WORDS = 11


class Block(nn.Module):
    """A transformer block with separate projections, which the compiler may combine."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True)
        x = x + F.dropout(y, self.dropout, self.training)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Setting:
    """Settings of a training.

    - ``sharded_first``: shard before dispatch, not after it.
    - ``sample``: dispatch with a sample input.
    - ``reshard``: free gathered parameters after forward.
    - ``mixed``: bfloat16 parameters with float32 reductions.
    - ``checkpoint``: wrap blocks in activation checkpoints.
    - ``accumulate``: accumulate gradients over two backwards.
    """

    sharded_first: bool = False
    sample: bool = False
    reshard: bool = True
    mixed: bool = False
    checkpoint: bool = False
    accumulate: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64


@dataclass
class Trained:
    """The losses of a rank's steps, the full weights, and the share of served calls."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    served: float


def _dispatch(model: Model, setting: Setting, device: torch.device) -> None:
    for block in model.blocks:
        if setting.sample:
            sample = torch.randn(2, 5, _WIDTH, dtype=setting.dtype, device=device)
            add_tvm_dispatch(block, sample)
        else:
            add_tvm_dispatch(block)


def train(setting: Setting, device: torch.device, *, tvm: bool, steps: int = 5) -> Trained:
    """Train on this rank's rows of random batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(setting.dropout).to(device, setting.dtype)
    blocks = list(model.blocks)
    if tvm and not setting.sharded_first:
        _dispatch(model, setting, device)
    if setting.checkpoint:
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

        model.blocks = nn.ModuleList(wrapper.checkpoint_wrapper(b) for b in blocks)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if setting.mixed else None,
        reduce_dtype=torch.float32 if setting.mixed else None,
    )
    mesh = dist.device_mesh.init_device_mesh(device.type, (size,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=setting.reshard)
    if tvm and setting.sharded_first:
        _dispatch(model, setting, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    torch.manual_seed(rank)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(0, _WORDS, (2 * size, 5), generator=generator).to(device)
        batches = words[2 * rank : 2 * rank + 2].split(1 if setting.accumulate else 2)
        for number, batch in enumerate(batches):
            model.set_requires_gradient_sync(number == len(batches) - 1)  # type: ignore[operator]
            loss = F.cross_entropy(model(batch).flatten(0, 1).to(setting.dtype), batch.flatten())
            (loss / len(batches)).backward()
            losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: w.full_tensor() for n, w in model.state_dict().items()}
    reports = [dispatch_report(block) for block in blocks] if tvm else []
    calls = sum(r.tvm_calls + sum(r.fallbacks.values()) for r in reports)
    served = sum(r.tvm_calls for r in reports) / calls if calls else 0.0
    return Trained(losses, weights, served)


def compared(rank: int, settings: dict[str, Setting], device_type: str = "cpu") -> dict[str, Any]:
    """Return, by setting, the share of served calls and the largest differences from eager."""
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    found = {}
    for name, setting in settings.items():
        eager, ours = (train(setting, device, tvm=t) for t in (False, True))
        losses = max(abs(a - b) for a, b in zip(eager.losses, ours.losses, strict=True))
        weights = max(float((eager.weights[n] - w).abs().max()) for n, w in ours.weights.items())
        found[name] = (ours.served, losses, weights)
    dist.destroy_process_group()
    return found

"""Functions that ranks run: training under tensor parallel, beside eager PyTorch's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from tvmbridge import add_tvm_dispatch, dispatch_report

_WORDS, _WIDTH, _HEADS, _LENGTH = 16, 32, 4, 8
STEPS = 5


class Attention(nn.Module):
    """Attention over the heads that this rank has."""

    def __init__(self, dropout: float, whole: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        # With ``whole`` the projections are DTensors, which have all heads.
        self.heads, self.dropout = _HEADS if whole else -1, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        projected = (each(x) for each in (self.q, self.k, self.v))
        shape = batch, length, self.heads, _WIDTH // _HEADS
        q, k, v = (each.view(shape).transpose(1, 2) for each in projected)
        if self.heads == _HEADS:  # PyTorch's attention on CPUs does not take DTensors
            y = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The gated MLP of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(_WIDTH, 3 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A Llama block."""

    def __init__(self, dropout: float, whole: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(_WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(dropout, whole), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Llama(nn.Module):
    """A small decoder."""

    def __init__(self, dropout: float = 0.0, whole: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, whole) for _ in range(2))
        self.norm = nn.RMSNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def columns_and_rows(model: Llama, mesh: Any) -> None:
    """Split the linear layers of each block by columns, then by rows."""
    columns = {name: ColwiseParallel() for name in _named("q k v", "gate up")}
    rows = {name: RowwiseParallel() for name in _named("o", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, {**columns, **rows})


def by_sequence(model: Llama, mesh: Any, *, whole: bool = False) -> None:
    """Split the sequence between attention and MLPs too, as PyTorch's tutorial does."""
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = {f"norms.{i}": SequenceParallel() for i in range(2)}
    plan |= {name: PrepareModuleInput(**gathered) for name in ("attention", "mlp")}
    for name in _named("q k v", "gate up"):
        local = not (whole and name.startswith("attention"))
        plan[name] = ColwiseParallel(use_local_output=local)
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in _named("o", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    outer = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outer)


def of_dtensors(model: Llama, mesh: Any) -> None:
    """As :func:`by_sequence`, and attention runs on DTensors."""
    by_sequence(model, mesh, whole=True)


def _named(attention: str, mlp: str) -> list[str]:
    names = [f"attention.{name}" for name in attention.split()]
    return [*names, *(f"mlp.{name}" for name in mlp.split())]


@dataclass(frozen=True)
class Setting:
    """Settings of a training.

    - ``split``: parallelizes the model.
    - ``before``: whether the blocks are dispatched before they are split.
    - ``dropout``: the probability in attention.
    - ``whole``: whether the whole model is dispatched, not its blocks.
    - ``longer``: by how many tokens each step's sequences are longer than those of the last.
    """

    split: Callable[[Llama, Any], None]
    before: bool = False
    dropout: float = 0.0
    whole: bool = False
    longer: int = 0
    dtype: torch.dtype = torch.float64


SETTINGS = {
    "columns and rows": Setting(columns_and_rows),
    "dispatched before": Setting(columns_and_rows, before=True),
    "dropout": Setting(columns_and_rows, dropout=0.2),
    "by sequence": Setting(by_sequence),
    "of DTensors": Setting(of_dtensors),
    "the whole model": Setting(by_sequence, whole=True),
    "of other lengths": Setting(by_sequence, longer=4),
    "float32": Setting(columns_and_rows, dtype=torch.float32),
}


def compared(rank: int, names: list[str], cache: str) -> dict[str, tuple[float, int, dict[str, int]]]:
    """Train in each setting; return the distance from eager PyTorch, the calls and fallbacks.

    The distance is that of losses and weights, relative to the largest value of each. Code is
    kept in the folder ``cache``: most parts of the settings are equal.
    """
    os.environ.update(TVMBRIDGE_CACHE="1", TVMBRIDGE_CACHE_DIR=cache)
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        expected, _ = _trained(SETTINGS[name], tvm=False)
        got, parts = _trained(SETTINGS[name], tvm=True)
        pairs = zip(expected, got, strict=True)
        furthest = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        reports = [dispatch_report(part) for part in parts]
        calls = sum(report.tvm_calls for report in reports)
        fallbacks = {text: n for report in reports for text, n in report.fallbacks.items()}
        found[name] = furthest, calls, fallbacks
    dist.destroy_process_group()
    return found


def _trained(setting: Setting, *, tvm: bool) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Train; return the losses and the weights, and the dispatched modules."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Llama(setting.dropout, setting.split is of_dtensors).to(setting.dtype)
    parts: list[nn.Module] = [model] if setting.whole else list(model.blocks)

    def dispatch() -> None:
        for part in parts if tvm else ():
            add_tvm_dispatch(part, options={"only_if_faster": False})

    if setting.before:
        dispatch()
    setting.split(model, mesh)
    if not setting.before:
        dispatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        words = torch.randint(_WORDS, (2, _LENGTH + step * setting.longer + 1))
        logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return [torch.stack(losses), *weights], parts

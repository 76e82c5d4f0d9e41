"""Functions that ranks run: training under tensor parallel, beside eager PyTorch's."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.reasons import Kind, Reason

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

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(_WIDTH, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A Llama block."""

    def __init__(self, dropout: float, hidden: int, whole: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(_WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(dropout, whole), MLP(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Llama(nn.Module):
    """A small decoder."""

    def __init__(self, dropout: float, hidden: int, whole: bool) -> None:
        super().__init__()
        self.checkpoint = False
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, hidden, whole) for _ in range(2))
        self.norm = nn.RMSNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
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


def uneven(model: Llama, mesh: Any) -> None:
    """Split MLPs whose columns the ranks cannot have in equal numbers."""
    plan = {"gate": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.mlp, mesh, {**plan, "up": plan["gate"]})


def dtensors_out(model: Llama, mesh: Any) -> None:
    """Have MLPs return sums that no rank has added up yet; each block gets them added up."""
    columns, rows = (
        ColwiseParallel(),
        RowwiseParallel(output_layouts=Partial(), use_local_output=False),
    )
    for block in model.blocks:
        parallelize_module(block.mlp, mesh, {"gate": columns, "up": columns, "down": rows})
        block.mlp.register_forward_hook(lambda _, given, result: result.full_tensor())


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
    - ``checkpoint``: whether backward recomputes the blocks.
    - ``sharded``: whether FSDP2 shards the blocks over the first half of the ranks' mesh.
    - ``ranks``: the number of ranks.
    """

    split: Callable[[Llama, Any], None]
    before: bool = False
    dropout: float = 0.0
    whole: bool = False
    longer: int = 0
    checkpoint: bool = False
    sharded: bool = False
    ranks: int = 2
    dtype: torch.dtype = torch.float64


SETTINGS = {
    "columns and rows": Setting(columns_and_rows),
    "dispatched before": Setting(columns_and_rows, before=True),
    "dropout": Setting(columns_and_rows, dropout=0.2),
    "by sequence": Setting(by_sequence),
    "of DTensors": Setting(of_dtensors),
    "uneven": Setting(uneven),
    "DTensors out": Setting(dtensors_out),
    "the whole model": Setting(by_sequence, whole=True),
    "of other lengths": Setting(columns_and_rows, longer=4),
    "checkpointed": Setting(by_sequence, checkpoint=True),
    "with FSDP2": Setting(columns_and_rows, sharded=True, ranks=4),
    "four ranks": Setting(by_sequence, ranks=4),
    "float32": Setting(by_sequence, dtype=torch.float32),
}


@dataclass(frozen=True)
class Found:
    """What a training found.

    - ``furthest``: the distance of losses and weights from eager PyTorch's, relative to the largest
      value of each.
    - ``calls``, ``fallbacks``: the calls that compiled code served, and why others were not.
    - ``same_gradients``: whether each gradient has the class and placements that eager gives.
    """

    furthest: float
    calls: int
    fallbacks: dict[str, int]
    same_gradients: bool


def compared(rank: int, name: str, cache: str, plant: str = "") -> Found:
    """Train in a setting, and compare with eager PyTorch.

    Args:
        cache: the folder of compiled code: most parts of the settings are equal.
        plant: how the last rank decides differently from the others; empty: it does not.
    """
    os.environ.update(TVMBRIDGE_CACHE="1", TVMBRIDGE_CACHE_DIR=cache)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    setting = SETTINGS[name]
    expected, _, placed = _trained(setting, tvm=False)
    with _planted(plant if rank == dist.get_world_size() - 1 else ""):
        got, parts, ours = _trained(setting, tvm=True)
    pairs = zip(expected, got, strict=True)
    furthest = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    reports = [dispatch_report(part) for part in parts]
    calls = sum(report.tvm_calls for report in reports)
    fallbacks = Counter[str]()
    for report in reports:
        fallbacks.update(report.fallbacks)
    dist.destroy_process_group()
    return Found(furthest, calls, dict(fallbacks), placed == ours)


@contextmanager
def _planted(plant: str) -> Iterator[None]:
    """Have this rank not trace a graph, or run some calls by the module's own forward."""
    if plant == "no trace":
        error = RuntimeError("a planted fault")
        with mock.patch("tvmbridge.dynamo.parts.in_local_parts", side_effect=error):
            yield
    elif plant == "own forward":
        calls = itertools.count()
        reason = Reason(Kind.FUNCTION_MODE)

        def refused() -> Reason | None:
            return reason if next(calls) % 3 == 1 else None

        with mock.patch("tvmbridge.runtime.dispatcher.refused_now", refused):
            yield
    else:
        yield


def _trained(setting: Setting, *, tvm: bool) -> tuple[list[torch.Tensor], list[nn.Module], Any]:
    """Train; return losses and weights, the dispatched modules, and the kinds of gradients."""
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if setting.sharded else (ranks,)
    names = ("data", "tensor")[-len(shape) :]
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    hidden = 3 * _WIDTH + (setting.split is uneven)
    model = Llama(setting.dropout, hidden, setting.split is of_dtensors).to(setting.dtype)
    model.checkpoint = setting.checkpoint
    parts: list[nn.Module] = [model] if setting.whole else list(model.blocks)
    if setting.split is dtensors_out:
        parts = [block.mlp for block in model.blocks]
    if tvm and setting.before:
        _dispatch(parts)
    setting.split(model, mesh["tensor"])
    if tvm and not setting.before:
        _dispatch(parts)
    for part in (*model.blocks, model) if setting.sharded else ():
        fully_shard(part, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    torch.manual_seed(1)
    losses, kinds = [], []
    for step in range(STEPS):
        words = torch.randint(_WORDS, (2, _LENGTH + step * setting.longer + 1))
        logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        kinds.append([(type(g), getattr(g, "placements", None)) for g in gradients])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    with torch.no_grad():
        logits = model.eval()(words[:, :-1])
    return [torch.stack(losses), logits, *weights], parts, kinds


def _dispatch(parts: list[nn.Module]) -> None:
    for part in parts:
        add_tvm_dispatch(part, options={"only_if_faster": False}, on_fallback="silent")

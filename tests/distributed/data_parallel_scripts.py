"""Functions that ranks run: training under DistributedDataParallel with backward in parts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.gradient_parts import Handed

_WIDTH = 16
_WORDS = 11
# Buckets of a kilobyte: a tenth of the model.
_BUCKET = 1e-3


class Net(nn.Module):
    """A model with tied words, a residual stream, and a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(_WIDTH)
        self.unused = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.linear(self.norm(x), self.words.weight)


@dataclass(frozen=True)
class Setting:
    """Settings of a training; ``wrapper`` has further arguments of DistributedDataParallel.

    - ``hook``: compress gradients to bfloat16.
    - ``accumulate``: a backward under ``no_sync`` before each synchronised one.
    - ``twice``: two calls of forward before their backward.
    - ``retain``: backward runs twice.
    - ``optimizer_in_hook``: a hook steps each parameter as soon as its gradient is there.
    """

    hook: bool = False
    accumulate: bool = False
    twice: bool = False
    retain: bool = False
    optimizer_in_hook: bool = False
    wrapper: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "plain": Setting(),
    "views": Setting(wrapper={"gradient_as_bucket_view": True}, retain=True),
    "static": Setting(wrapper={"static_graph": True, "find_unused_parameters": False}),
    "twice": Setting(twice=True),
    "no_sync": Setting(accumulate=True),
    "bfloat16": Setting(hook=True),
    "in hooks": Setting(optimizer_in_hook=True),
}


def _backward(parallel: Any, setting: Setting, batches: list[torch.Tensor]) -> list[float]:
    def loss_of(words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(parallel(words).flatten(0, 1), words.flatten())

    if setting.twice:
        losses = [loss_of(words) for words in batches]
        torch.stack(losses).sum().backward()
        return [float(loss.detach()) for loss in losses]
    losses = []
    for number, words in enumerate(batches):
        last = number == len(batches) - 1
        with parallel.no_sync() if setting.accumulate and not last else contextlib.nullcontext():
            losses.append(loss_of(words))
            if setting.retain:
                losses[-1].backward(retain_graph=True)
            losses[-1].backward()
    return [float(loss.detach()) for loss in losses]


def _compressed(events: list[str], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as bfloat16 would carry it; PyTorch's own hook needs NCCL."""
    events.append("bucket")
    buffer = bucket.buffer()
    rounded = buffer.to(torch.bfloat16).float() / dist.get_world_size()
    future = dist.all_reduce(rounded, async_op=True).get_future()  # type: ignore[union-attr]
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _trained(module: nn.Module, setting: Setting, events: list[str]) -> list[torch.Tensor]:
    """Train for three steps; return the losses and the weights."""
    wrapper = {"find_unused_parameters": True, **setting.wrapper}
    parallel: Any = DistributedDataParallel(module, bucket_cap_mb=_BUCKET, **wrapper)
    if setting.hook:
        # PyTorch compares the annotations of a function, which are strings here.
        parallel.register_comm_hook(events, lambda events, bucket: _compressed(events, bucket))
    used = list(module.parameters())
    optimizer = torch.optim.SGD(used, lr=0.1, momentum=0.9)
    if setting.optimizer_in_hook:
        for parameter in used:
            parameter.register_hook(lambda g, p=parameter: p.data.sub_(g, alpha=0.01))
    losses = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        count = 2 if setting.accumulate or setting.twice else 1
        batches = [torch.randint(0, _WORDS, (2, 5), generator=generator) for _ in range(count)]
        losses += _backward(parallel, setting, batches)
        optimizer.step()
        optimizer.zero_grad()
    return [torch.tensor(losses), *(p.detach().clone() for p in module.parameters())]


def compared(rank: int, parts: int | None = None) -> dict[str, tuple[float, int, list[str]]]:
    """Train with each of the settings; ``parts`` is the option ``gradient_parts``.

    Return, by setting, the largest difference from eager training, the calls that compiled code
    served, and the events in their order: parts of backward that begin, and buckets that a hook
    exchanges.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    eager = Net().double().train()
    sample = torch.zeros(2, 5, dtype=torch.int64)
    options = {"only_if_faster": False, "gradient_parts": parts}
    dispatched = add_tvm_dispatch(copy.deepcopy(eager), sample, options=options)
    found = {}
    for name, setting in SETTINGS.items():
        events: list[str] = []
        expected = _trained(copy.deepcopy(eager), setting, [])
        ours = copy.deepcopy(dispatched)
        with _recorded(events):
            got = _trained(ours, setting, events)
        furthest = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
        report = dispatch_report(ours)
        assert not report.fallbacks
        found[name] = furthest, report.tvm_calls, events
    dist.destroy_process_group()
    return found


@contextlib.contextmanager
def _recorded(events: list[str]) -> Iterator[None]:
    """Note in ``events`` each part of backward that begins."""
    run = Handed._run

    def noted(self: Any, part: Any, *args: Any) -> Any:
        events.append("part")
        return run(self, part, *args)

    with mock.patch.object(Handed, "_run", noted):
        yield

"""Measure each part of a graph: the seconds of forward and backward, and the bytes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.backends import backend_of
from tvmbridge.core.devices import gpus_of
from tvmbridge.distributed.graph import PipelineGraph
from tvmbridge.distributed.splitting import StageModule, cut

_ROUNDS = 5


@dataclass(frozen=True)
class PartCost:
    """The cost of one part for one micro-batch in eager PyTorch.

    - ``forward``, ``backward``: seconds.
    - ``parameters``: bytes of the parameters.
    - ``kept``: bytes that forward keeps for backward.
    - ``received``: bytes that cross the cut before the part.
    """

    forward: float
    backward: float
    parameters: int
    kept: int
    received: int


def measure(
    graph: PipelineGraph,
    positions: Sequence[int],
    leaves: Sequence[Any],
    device: torch.device,
) -> list[PartCost]:
    """Return the costs of the parts between ``positions``; measure equal parts once."""
    known: dict[str, tuple[float, float, int]] = {}
    costs = []
    parts = cut(graph, positions, [device] * len(positions))
    for part in parts:
        if part.key not in known:
            with torch.random.fork_rng(devices=gpus_of(device)):
                known[part.key] = _measured(part, leaves, device)
        forward, backward, kept = known[part.key]
        parameters = sum(_bytes(p) for p in part.module.parameters())
        received = sum(_bytes(t) for t in part.received)
        costs.append(PartCost(forward, backward, parameters, kept, received))
    return costs


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _measured(
    part: StageModule, leaves: Sequence[Any], device: torch.device
) -> tuple[float, float, int]:
    # A copy keeps the module's buffers and gradients as they are.
    module = copy.deepcopy(part.module).to(device)
    received = sample_of(part, device)
    given = [
        leaves[i].to(device) if isinstance(leaves[i], torch.Tensor) else leaves[i]
        for i in part.used_inputs
    ]
    forwards, backwards, kept = [], [], 0
    for round_ in range(_ROUNDS):
        if round_ == 0:
            outputs, kept = _counting(lambda: module(*received, *given), module)
        else:
            outputs, seconds = _timed(lambda: module(*received, *given), device)
            forwards.append(seconds)
        seconds = _backward(outputs, [*received, *module.parameters()], device)
        if round_:
            backwards.append(seconds)
    return min(forwards), min(backwards), kept


def sample_of(stage: StageModule, device: torch.device) -> list[torch.Tensor]:
    """Return tensors with random values and the shapes that the stage receives."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(t.shape, generator=generator)
        .to(device=device, dtype=t.dtype)
        .as_strided(t.shape, t.stride())
        .requires_grad_()
        for t in stage.received
    ]


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result of a call, and its seconds."""
    calls = backend_of(device).timed_calls
    backend_of(device).synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    backend_of(device).synchronize(device)
    return result, (time.perf_counter() - start) / calls


def _backward(
    outputs: Sequence[Any], inputs: Sequence[torch.Tensor], device: torch.device
) -> float:
    roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not roots or not wanted:
        return 0.0
    seeds = [torch.ones_like(o) for o in roots]

    def gradients() -> Any:
        return torch.autograd.grad(roots, wanted, seeds, retain_graph=True, allow_unused=True)

    return _timed(gradients, device)[1]


def _counting(function: Callable[[], Any], module: nn.Module) -> tuple[Any, int]:
    """Return the result, and the bytes that autograd keeps beyond the module's own tensors."""
    own = {t.untyped_storage().data_ptr() for t in module.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, sum(kept.values())

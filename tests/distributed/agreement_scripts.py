"""Functions that ranks run: data parallel training in which ranks decide differently."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.sharded_scripts import Block
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler import cached_build
from tvmbridge.core.errors import BuildError
from tvmbridge.distributed import PipelineRunner
from tvmbridge.kernels import table
from tvmbridge.runtime import entry_compiler

_GENUINE = entry_compiler.compile_module
_CHOICE = table.Table.choice
_COMPILE_CODE = cached_build.compile_code


def _unlike(rank: int, seconds: float) -> Any:
    """Make rank 1 compile ``seconds`` longer, and have rank 2 refuse all code."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            time.sleep(seconds)
        if rank == 2:
            raise BuildError("a planted refusal")
        return _GENUINE(*args, **kwargs)

    return mock.patch.object(entry_compiler, "compile_module", compiled)


def _losses(model: nn.Module, rank: int, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 5, 16, dtype=torch.float64, generator=generator)
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    held = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, [p.detach().clone() for p in held]


def unlike_ranks(rank: int, strategy: str, seconds: float) -> tuple[float, int, int]:
    """Return the largest difference from eager training, the calls served, and the fallbacks."""
    dist.init_process_group("gloo")
    eager, _, _ = _trained(rank, strategy, None)
    ours, served, fallbacks = _trained(rank, strategy, seconds)
    dist.destroy_process_group()
    furthest = max(float((a - b).abs().max()) for a, b in zip(eager, ours, strict=True))
    return furthest, served, fallbacks


def _trained(
    rank: int, strategy: str, seconds: float | None
) -> tuple[list[torch.Tensor], int, int]:
    """Train blocks that are dispatched, or in eager PyTorch if ``seconds`` is None.

    The process group must outlive the wrapper, which is freed when this function returns.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(0.0), Block(0.0)).double().train()
    blocks = list(model)
    for block in blocks if seconds is not None else ():
        add_tvm_dispatch(block, options={"only_if_faster": False}, on_fallback="silent")
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*blocks, model):
            fully_shard(part, mesh=mesh)
    with _unlike(rank, seconds or 0.0):
        losses, weights = _losses(model, rank, 3)
    reports = [dispatch_report(block) for block in blocks] if seconds is not None else []
    fallbacks = sum(sum(r.fallbacks.values()) for r in reports)
    return [torch.tensor(losses), *weights], sum(r.tvm_calls for r in reports), fallbacks


def together(rank: int, seconds: float, timeout: float) -> dict[str, Any]:
    """Train under DDP with blocks that all ranks compile together.

    Rank 1 compiles ``seconds`` longer, and rank 2 refuses the last block alone. A collective fails
    after ``timeout`` seconds. Return the difference from eager, the calls and reasons of each
    block, the kernels that this rank has measured, and the modules that it has compiled.
    """
    # The ranks' connections are made before the time runs.
    dist.init_process_group("gloo")
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    measured: list[str] = []
    built: list[str] = []

    def choice(self: Any, question: str, among: Any, measure: Any) -> str:
        return _CHOICE(self, question, among, lambda: (measured.append(question), measure())[1])

    def code(*args: Any, **kwargs: Any) -> Any:
        built.append("code")
        return _COMPILE_CODE(*args, **kwargs)

    def compiled(request: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            time.sleep(seconds)
        if rank == 2 and isinstance(request.module, nn.Sequential):
            raise BuildError("a planted refusal")
        return _GENUINE(request, *args, **kwargs)

    def trained(tvm: bool) -> tuple[list[torch.Tensor], list[Any]]:
        torch.manual_seed(0)
        last = nn.Sequential(nn.Linear(128, 128), nn.GELU())
        model: Any = nn.Sequential(_Layer(), _Layer(), last).train()
        blocks = list(model)
        for block in blocks if tvm else ():
            options = {"compiler_collectives": True}
            add_tvm_dispatch(block, options=options, on_fallback="silent")
        model = DistributedDataParallel(model, process_group=group)
        generator = torch.Generator().manual_seed(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(64, 128, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        reports = [dispatch_report(block) for block in blocks] if tvm else []
        found = [(r.tvm_calls, tuple(r.fallbacks)) for r in reports]
        return [p.detach().clone() for p in model.parameters()], found

    eager, _ = trained(False)
    with (
        mock.patch.object(entry_compiler, "compile_module", compiled),
        mock.patch.object(table.Table, "choice", choice),
        mock.patch.object(cached_build, "compile_code", code),
    ):
        ours, calls = trained(True)
    furthest = max(float((a - b).abs().max()) for a, b in zip(eager, ours, strict=True))
    dist.barrier()
    dist.destroy_process_group()
    return {"furthest": furthest, "calls": calls, "measured": measured, "built": built}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(128, 128), nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Exchanging(nn.Module):
    """A module whose forward sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.exchanged(self.first(x))))  # type: ignore[no-any-return]


class Functional(Exchanging):
    """The sum is a functional collective."""

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD)


class Differentiable(Exchanging):
    """The sum is an autograd function of PyTorch, which raises where torch.export traces."""

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed.nn.functional

        return torch.distributed.nn.functional.all_reduce(x)  # type: ignore[no-any-return]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class InBackward(Exchanging):
    """The exchange is in backward alone."""

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        return _Copied.apply(x)  # type: ignore[no-any-return,no-untyped-call]


EXCHANGING = (Exchanging, Functional, Differentiable, InBackward)


def exchanging(rank: int) -> dict[str, tuple[float, str]]:
    """Return, by class, the difference from eager and the reason; rank 1 dispatches nothing."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found = {}
    for kind in EXCHANGING:
        results, reason = [], ""
        for tvm in (False, True):
            torch.manual_seed(0)
            module = kind().double().train()
            if tvm and rank == 0:
                add_tvm_dispatch(module, on_fallback="silent")
            results.append(_losses(module, rank, 2))
            if tvm and rank == 0:
                report = dispatch_report(module)
                assert not report.tvm_calls
                (reason,) = report.fallbacks
        (losses, weights), (others, other_weights) = results
        pairs = zip((torch.tensor(losses), *weights), (torch.tensor(others), *other_weights),
                    strict=True)  # fmt: skip
        found[kind.__name__] = max(float((a - b).abs().max()) for a, b in pairs), reason
    dist.destroy_process_group()
    return found


def tensor_parallel(rank: int) -> dict[str, tuple[float, int, tuple[str, ...]]]:
    """Dispatch parts of a model with tensor parallel layers; compare each with eager."""
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    eager = None
    for name in ("", "norm", "head", "middle"):
        torch.manual_seed(0)
        middle = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        model = nn.Sequential()
        model.add_module("norm", nn.LayerNorm(16))
        model.add_module("middle", middle)
        model.add_module("head", nn.Linear(16, 16))
        model.double().train()
        if name:
            add_tvm_dispatch(model.get_submodule(name), on_fallback="silent")
        parallelize_module(middle, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        losses, weights = _losses(model, 0, 3)
        if eager is None:
            eager = losses, weights
            continue
        pairs = zip((torch.tensor(losses), *weights), (torch.tensor(eager[0]), *eager[1]),
                    strict=True)  # fmt: skip
        report = dispatch_report(model.get_submodule(name))
        furthest = max(float((a - b).abs().max()) for a, b in pairs)
        found[name] = furthest, report.tvm_calls, tuple(report.fallbacks)
    dist.destroy_process_group()
    return found


def pretrain(rank: int, strategy: str, folder: str, steps: int, killed: int | None) -> list[float]:
    """Run ``examples/pretrain.py``; rank 1 is killed in step ``killed``, within backward's step."""
    from examples import pretrain as script

    counted = iter(range(steps))
    clips: Any = PipelineRunner if strategy == "pipeline" else nn.utils
    genuine = clips.clip_grad_norm_

    def clipped(*args: Any, **kwargs: Any) -> Any:
        if next(counted) == killed and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return genuine(*args, **kwargs)

    given = ["--strategy", strategy, "--layers", "2", "--steps", str(steps), "--every", "2"]
    given += ["--width", "32", "--length", "8", *(["--folder", folder] if folder else [])]
    with mock.patch.object(clips, "clip_grad_norm_", clipped):
        losses = script.train(script.arguments(given))
    dist.destroy_process_group()
    return losses

"""Functions that each rank of a test of collectives runs, in its own process."""

from __future__ import annotations

import copy
import datetime
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol

ROOT = Path(__file__).parents[2]
TIMEOUT = 20.0


def run_ranks(world: int, first: int, count: int, limit: float) -> list[tuple[int, str]]:
    """Run ``world`` ranks; return the exit status and output of each.

    Args:
        world: the number of ranks.
        first, count: the seeds of the random modules.
        limit: seconds after which the ranks are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.fx.ranks"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world), f"{folder}/store", str(first), str(count)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            found = [process.communicate(timeout=limit)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [(p.returncode, text) for p, text in zip(processes, found, strict=True)]


class Steps(nn.Module):
    """Random steps on two values; some steps communicate, by the same collectives on all ranks.

    Row counts differ by rank, and so do the layers and the local computations.
    """

    def __init__(self, seed: int, rank: int, world: int) -> None:
        super().__init__()
        common, own = random.Random(seed), random.Random(f"{seed} {rank}")
        torch.manual_seed(seed * 100 + rank)
        self.rank, self.world = rank, world
        kinds = ["all_to_all", "reduce", "gather", "scatter"]
        self.steps = [common.choice([*kinds, "local"]) for _ in range(common.randint(1, 5))]
        self.alone = [[own.randint(0, 3) for _ in range(own.randint(0, 3))] for _ in self.steps]
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]).double()
        self.sent = [[common.randint(0, 3) for _ in range(world)] for _ in range(world)]
        self.drop = nn.Dropout(0.3)

    def rows(self) -> int:
        """Return the number of rows of this rank."""
        return sum(self.sent[self.rank])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Run the steps; ``x`` is communicated, ``y`` stays on this rank."""
        for kind, alone in zip(self.steps, self.alone, strict=True):
            x = x + self._communicated(kind, torch.tanh(self.layers[0](x)))
            for number in alone:
                y = self.drop(torch.tanh(self.layers[number](y)))
        return x.sum(0) + y

    def _communicated(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        group: Any = dist.group.WORLD
        if kind == "all_to_all":
            received = [self.sent[source][self.rank] for source in range(self.world)]
            moved = funcol.all_to_all_single_autograd(x, received, self.sent[self.rank], group)
            return moved.sum(0)
        if kind == "reduce":
            return funcol.all_reduce(x.sum(0), "sum", group)
        if kind == "gather":
            return funcol.all_gather_tensor_autograd(x.sum(0, keepdim=True), 0, group).mean(0)
        if kind == "scatter":
            whole = x.sum(0, keepdim=True).expand(self.world, 4).contiguous()
            return funcol.reduce_scatter_tensor_autograd(whole, "sum", 0, group)
        return x.relu()


def compared(seed: int, rank: int, world: int) -> None:
    """Compare a module with its rewritten copy: results, gradients and random draws."""
    import tvmbridge
    from tests.fx_models import outcome
    from tvmbridge.passes.fx.overlap_communication import OverlapCommunication

    module = Steps(seed, rank, world)
    reference = copy.deepcopy(module)
    x = torch.randn(module.rows(), 4, dtype=torch.float64)
    for number, rows in enumerate((3, 2)):
        y = torch.randn(rows, 4, dtype=torch.float64)
        if not number:
            tvmbridge.optimize_fx(module, (x, y), [OverlapCommunication()], measure=False)
        ours = outcome(_With(module, y), x, 7)
        theirs = outcome(_With(reference, y), x, 7)
        for a, b in zip(ours, theirs, strict=True):
            largest = max([1.0, *b.abs().reshape(-1).tolist()])
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * largest)
    if set(module.steps) - {"local"}:
        report = tvmbridge.fx_report(module)
        assert not report.fallbacks, report.fallbacks
        assert report.calls == 2


class _With(nn.Module):
    def __init__(self, module: nn.Module, y: torch.Tensor) -> None:
        super().__init__()
        self.module, self.y = module, y

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x, self.y)


class Other(nn.Module):
    """A module whose collectives depend on the rank."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what, self.rank = what, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group: Any = dist.group.WORLD
        if self.what == "cannot" and self.rank and x.sum() > 0:
            return x
        x = funcol.all_reduce(x, "sum", group)
        if self.what == "more" and self.rank:
            x = funcol.all_reduce(x, "sum", group)
        kind = "max" if self.what == "kind" and self.rank else "sum"
        return funcol.all_reduce(x, kind, group)


def refused(rank: int, world: int) -> None:
    """Rewrite modules whose collectives differ by rank; each rank must get the error."""
    import tvmbridge
    from tvmbridge.core.errors import BridgeError
    from tvmbridge.passes.fx.overlap_communication import OverlapCommunication

    for what in ("more", "kind", "cannot"):
        try:
            tvmbridge.optimize_fx(Other(what, rank), torch.ones(3), [OverlapCommunication()])
        except BridgeError as error:
            print(f"{what}: {type(error).__name__}: {error}")
        else:
            print(f"{what}: nothing")


def death(rank: int, world: int) -> None:
    """End the last rank within a step; the other ranks must report it."""
    import tvmbridge
    from tvmbridge.core.errors import CommunicationError
    from tvmbridge.passes.fx.overlap_communication import OverlapCommunication

    module = Steps(3, rank, world)
    module.steps = ["all_to_all", "reduce", "gather"]
    module.alone = [[0], [1], [2]]
    x = torch.randn(module.rows(), 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 4, dtype=torch.float64)
    tvmbridge.optimize_fx(module, (x, y), [OverlapCommunication()], measure=False)
    module(x, y).sum().backward()
    loss = module(x, y).sum()
    sys.stdout.flush()
    if rank == world - 1:
        os._exit(7)
    try:
        loss.backward()
        module(x, y)
    except CommunicationError as error:
        print(f"told: {error}", flush=True)
        os._exit(0)
    os._exit(1)


def main() -> None:
    """Run this rank, as the command line says."""
    rank, world, store, first, count = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    for seed in range(int(first), int(first) + int(count)):
        compared(seed, int(rank), int(world))
    print("agreed")
    if int(world) > 1:
        refused(int(rank), int(world))
        death(int(rank), int(world))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

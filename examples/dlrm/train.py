"""Train the DLRM: the loop, its report, and the processes of ``torchrun``."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import tvmbridge
from examples.dlrm.clicks import Batch, Clicks
from examples.dlrm.model import DLRM, Sizes


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of processes, and the device."""

    rank: int
    world: int
    device: torch.device


def join() -> Place:
    """Join the processes that ``torchrun`` started; without torchrun there is one process."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > local
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    return Place(rank, world, device)


def make(sizes: Sizes, place: Place, seed: int = 0) -> DLRM:
    """Return a model with the same networks on all ranks, and this rank's tables."""
    torch.manual_seed(seed)
    whole = DLRM(sizes)
    model = DLRM(sizes, place.rank, place.world)
    own = model.state_dict()
    model.load_state_dict({name: whole.state_dict()[name] for name in own})
    return model.to(place.device)


class Step:
    """A training step: forward, backward, the mean of gradients over the ranks, update."""

    def __init__(self, model: DLRM, place: Place, rate: float = 0.02) -> None:
        self.model, self.place = model, place
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            model.parameters(), lr=rate, fused=True
        )
        self.shared = model.replicated()
        self.flat = torch.zeros(sum(p.numel() for p in self.shared)).to(self.shared[0])
        pieces = self.flat.split([p.numel() for p in self.shared])
        self.pieces = [piece.view_as(p) for piece, p in zip(pieces, self.shared, strict=True)]
        self.loss_of = nn.BCEWithLogitsLoss()

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Run a step; return the loss of this rank's rows."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.loss_of(self.model(batch.dense, batch.features), batch.labels)
        # The mean over all rows: the all-to-all adds up a table's gradients of all ranks.
        (loss / self.place.world).backward()
        self.add_up()
        self.optimizer.step()
        return loss.detach()

    def add_up(self) -> None:
        """Add up the gradients of the replicated parameters over the ranks, as one tensor."""
        if self.place.world == 1:
            return
        gradients = [p.grad for p in self.shared]
        torch._foreach_copy_(self.pieces, gradients)
        dist.all_reduce(self.flat)
        torch._foreach_copy_(gradients, self.pieces)


def explained(as_it_is: float, with_passes: float, device: torch.device) -> str:
    """Return a text about the speed with and without the passes, and when they are worthwhile.

    Args:
        as_it_is, with_passes: rows a second without and with the passes.
        device: the device that the model was trained on.
    """
    ratio = as_it_is / with_passes
    text = f"a step with the passes takes {ratio:.2f} of the time of a step without them. "
    text += "The passes save kernel launches and copies of small tensors. "
    if device.type == "cpu":
        text += (
            "On a CPU a launch costs about a microsecond, and to stack the weights of equal chains "
            "costs more than that: the passes pay on a GPU, from about 100 features on "
            "(docs/recommenders.md has figures). "
        )
    if ratio > 1:
        text += (
            "Here they do not pay. optimize_fx undoes such passes, unless measure=False is given, "
            "as it is here to compare the losses."
        )
    return text


def train(
    sizes: Sizes, place: Place, rows: int, steps: int, *, passes: bool, every: int = 20
) -> tuple[list[float], float]:
    """Train; return the mean loss of each ``every`` steps, and the rows a second.

    The loss is the mean over all ranks. The speed leaves out the first ``every`` steps. Rank 0
    prints the progress.
    """
    model = make(sizes, place)
    clicks = Clicks(sizes, rows, place.rank, place.world)
    first = clicks[0].to(place.device)
    if passes:
        tvmbridge.optimize_fx(model, (first.dense, first.features), measure=False)
    step, losses, recent = Step(model, place), [], []
    start, done, speed = time.perf_counter(), 0, 0.0
    for number in range(steps):
        recent.append(step(clicks[number].to(place.device)))
        done += rows * place.world
        if (number + 1) % every == 0:
            mean = torch.stack(recent).mean()
            if place.world > 1:
                dist.all_reduce(mean)
                mean /= place.world
            losses.append(float(mean))
            recent = []
            if number + 1 > every or steps == every:
                speed = done / (time.perf_counter() - start)
            else:  # the first steps are warm-up
                start, done = time.perf_counter(), 0
            if not place.rank:
                shown = f", {speed:,.0f} rows a second" if speed else ""
                print(f"step {number + 1:4}: loss {losses[-1]:.4f}{shown}", flush=True)
    if passes and not place.rank:
        print(tvmbridge.fx_report(model), flush=True)
    return losses, speed


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rows", type=int, default=256, help="of a batch, on each rank")
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--table", type=int, default=2000, help="rows of each table")
    parser.add_argument("--compare", action="store_true", help="train it as it is first")
    parser.add_argument("--no-passes", action="store_true", help="train the module as it is")
    options = parser.parse_args()
    place = join()
    sizes = Sizes(features=options.features, rows=options.table)
    speeds = []
    for passes in (False, True) if options.compare else (not options.no_passes,):
        if not place.rank:
            print("with the passes:" if passes else "as it is:", flush=True)
        losses, speed = train(sizes, place, options.rows, options.steps, passes=passes)
        speeds.append(speed)
        if not place.rank and losses:
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
    if not place.rank and len(speeds) == 2 and all(speeds):
        print(explained(*speeds, place.device), flush=True)
    if place.world > 1:
        dist.destroy_process_group()

"""A training step of the DLRM with the fx passes, over a step of torchrec's pipeline, on two ranks.

``torchrun --nproc-per-node 2 -m benchmarks.recommender_torchrec`` needs torchrec and fbgemm (1.8
with PyTorch 2.13). It uses NCCL if there are GPUs, and otherwise gloo on CPUs. Both sides train
the model of ``examples/dlrm`` from the same weights on the same rows. Before any timing, one step
of each side is compared with the unsharded model in float64, and steps with Adagrad are compared
between the sides.

- torchrec: ``TrainPipelineSparseDist`` over ``DistributedModelParallel``. Each rank reads all
  features of its rows. The pipeline sends them to the ranks of the tables while the batch before
  is computed. One lookup reads all tables of a rank, and backward updates only the rows that were
  looked up. ``DistributedDataParallel`` adds up the other gradients.
- tvmbridge: the example's step with all passes. Gradients of tables have the tables' whole size,
  and one optimizer updates all parameters. In the row "as fed" a rank reads the features of its
  tables for the rows of all ranks, as the example does. In the row "distributed" a rank reads all
  features of its rows, as torchrec does, and sends them to the ranks of the tables while the
  batches before are computed.

Both sides use Adagrad for all parameters. With Adagrad a row that was not looked up does not
change, whether its gradient is zero or missing; with Adam it would. fbgemm has no Adam for CPUs.
Batches are drawn and joined before the timing. The cost of whole gradients grows with the rows of
a table: ``--table`` sets them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tvmbridge
from benchmarks.common import Row, in_turns, parser, report
from benchmarks.recommender_keyed import Pipelined, Rule
from benchmarks.recommender_rows import Distribution, by_rank, of_rows
from benchmarks.recommender_step import synchronized
from examples.dlrm.clicks import Batch, Clicks
from examples.dlrm.model import Sizes
from examples.dlrm.train import Place, Step, join, make

BATCHES = 8
# Steps a turn: enough that data one side still sends is a small part of the other side's turn.
STEPS = 5


def pinned(batch: Batch, place: Place) -> Batch:
    """Return the batch in pinned memory if the device is a GPU, otherwise unchanged."""
    if place.device.type == "cpu":
        return batch
    features = batch.features.pin_memory()
    return Batch(batch.dense.pin_memory(), batch.labels.pin_memory(), features)


class Ours:
    """The example's step with all passes; each call runs a step."""

    def __init__(self, sizes: Sizes, place: Place, rule: Rule, sample: Batch) -> None:
        self.place = place
        self.batches: Iterator[Batch] = iter(())
        self.model = make(sizes, place)
        given = sample.to(place.device)
        tvmbridge.optimize_fx(self.model, (given.dense, given.features), measure=False)
        self.step = Step(self.model, place)
        self.step.optimizer = rule.dense(self.model.parameters())

    def __call__(self) -> torch.Tensor:
        """Run a step; return the loss of this rank's rows."""
        return self.step(next(self.batches).to(self.place.device))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters by name."""
        return dict(self.model.named_parameters())


def sides(
    sizes: Sizes, place: Place, rule: Rule, by_rows: Sequence[Batch], by_tables: Sequence[Batch]
) -> dict[str, Pipelined | Ours]:
    """Return the compared trainers by name; all get the same rows in the same order."""
    fed, distributed = (Ours(sizes, place, rule, by_tables[0]) for _ in range(2))
    fed.batches = itertools.cycle(by_tables)
    distributed.batches = Distribution(sizes, place).ahead(itertools.cycle(by_rows))
    return {
        "torchrec": Pipelined(sizes, place, rule, by_rows),
        "tvmbridge, as fed": fed,
        "tvmbridge, distributed": distributed,
    }


def mean(loss: torch.Tensor) -> float:
    """Return the mean of the loss over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def largest(errors: Sequence[float]) -> float:
    """Return the largest error of all ranks; NaN if an error is NaN."""
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, float(torch.tensor(errors).max()))
    return float(torch.tensor(every).max())


def turn(call: Callable[[], Any], place: Place) -> Callable[[], None]:
    """Return a function that runs ``STEPS`` steps and waits until the device is done."""

    def run() -> None:
        for _ in range(STEPS):
            call()

    return synchronized(run, place)


def spread(name: str, values: Sequence[float], unit: str, bound: float | None = None) -> Row:
    """Return a row with the median of the rounds' values, and the quartiles in its name."""
    low, median, high = statistics.quantiles(values, n=4)
    return Row(f"{name} (quartiles {low:.3g}, {high:.3g})", median, unit, bound)


def undivided(
    sizes: Sizes, batch: Batch, place: Place
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return loss, parameters and gradients of the unsharded model in float64, on all rows."""
    model = make(sizes, Place(0, 1, torch.device("cpu"))).double()
    model.names = tuple(by_rank(sizes, place.world))
    logits = model(batch.dense.double(), batch.features)
    loss = nn.BCEWithLogitsLoss()(logits, batch.labels.double())
    loss.backward()
    before = {name: p.detach() for name, p in model.named_parameters()}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), before, gradients


def proven(sizes: Sizes, rows: int, place: Place) -> list[Row]:
    """Compare loss and gradients of one step of each side with the unsharded model.

    The gradient is the change of a weight by a step of SGD, divided by the rate. The rate is large
    enough that rounding of the weight does not hide the change.
    """
    rule = Rule("SGD", 1e3)
    whole = Clicks(sizes, rows * place.world)[0]
    loss, before, gradients = undivided(sizes, whole, place)
    fed = Clicks(sizes, rows, place.rank, place.world)[0]
    compared = sides(sizes, place, rule, [of_rows(whole, sizes, place)], [fed])
    found = []
    for name, side in compared.items():
        error = abs(mean(side()) - loss) / abs(loss)
        after = {n: p.detach().cpu().double() for n, p in side.parameters().items()}
        tables = {n for n in after if n.startswith("tables.")}
        assert tables == {f"tables.{n}.weight" for n in sizes.of_rank(place.rank, place.world)}
        assert set(after) - tables == {n for n in before if not n.startswith("tables.")}
        errors = [
            float(((before[n] - p) / rule.rate - gradients[n]).norm() / gradients[n].norm())
            for n, p in after.items()
        ]
        found.append(Row(f"{name}: loss of a step", error, "of float64", 1e-6))
        found.append(Row(f"{name}: gradients", largest(errors), "of float64", 1e-5))
    return found


def measure(sizes: Sizes, rows: int, rounds: int, place: Place) -> list[Row]:
    """Compare the losses of steps with Adagrad, then time later steps in turns on this rank."""
    whole, own = Clicks(sizes, rows * place.world), Clicks(sizes, rows, place.rank, place.world)
    by_rows = [pinned(of_rows(whole[i], sizes, place), place) for i in range(BATCHES)]
    by_tables = [pinned(own[i], place) for i in range(BATCHES)]
    compared = sides(sizes, place, Rule("Adagrad", 0.02), by_rows, by_tables)
    losses = [[mean(side()) for _ in range(BATCHES)] for side in compared.values()]
    apart = [abs(a - b) for other in losses[1:] for a, b in zip(other, losses[0], strict=True)]
    times = in_turns([turn(side, place) for side in compared.values()], rounds=rounds)
    for side in compared.values():
        if isinstance(side, Ours) and (fallbacks := tvmbridge.fx_report(side.model).fallbacks):
            raise RuntimeError(f"calls were left to the module's own forward: {fallbacks}")
    found = [Row(f"losses of {BATCHES} steps with Adagrad, apart", largest(apart), "", 1e-6)]
    found += [
        spread(n, [s / STEPS * 1e3 for s in t], "ms") for n, t in zip(compared, times, strict=True)
    ]
    for name, taken in list(zip(compared, times, strict=True))[1:]:
        ratios = [ours / theirs for ours, theirs in zip(taken, times[0], strict=True)]
        found.append(spread(name, ratios, "of torchrec", 1.0))
    return found


def main(argv: Sequence[str] = ()) -> int:
    """Compare and measure on all ranks; rank 0 prints the table."""
    options = parser(__doc__)
    options.add_argument("--features", type=int, nargs="+", default=[26, 100])
    options.add_argument("--rows", type=int, default=512, help="of a batch, on each rank")
    options.add_argument("--table", type=int, default=2000, help="rows of each table")
    options.add_argument("--rounds", type=int, default=40)
    chosen = options.parse_args(argv)
    place = join()
    status = 0
    for features in chosen.features:
        sizes = Sizes(features=features, rows=chosen.table)
        found = proven(sizes, chosen.rows, place)
        found += measure(sizes, chosen.rows, chosen.rounds, place)
        if not place.rank:
            title = f"DLRM, {features} features, on {place.world} {place.device.type} ranks"
            status |= report(title, found, check=not chosen.no_check)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

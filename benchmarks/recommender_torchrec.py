"""A training step of the DLRM with the fx passes, over that of torchrec's pipeline, on two ranks.

Run by ``torchrun --nproc-per-node 2 -m benchmarks.recommender_torchrec`` where torchrec and fbgemm
are installed (1.8 with PyTorch 2.13): on GPUs by NCCL where there are any, otherwise on CPUs by
gloo. Both train the model of ``examples/dlrm`` from the same weights on the same rows; before
anything is timed, a step of each is held against the undivided model in float64, and steps with
Adagrad against each other.

Either side does what it does by itself:

- torchrec: ``TrainPipelineSparseDist`` over ``DistributedModelParallel``. Each rank reads all
  features of its rows, and the pipeline sends them to the ranks of the tables while the batch
  before is computed. All tables of a rank are one lookup, which updates them within backward, the
  rows that were looked up alone. ``DistributedDataParallel`` adds up the other gradients.
- tvmbridge: the example's step with all passes. Tables have gradients of their whole size, and one
  optimizer updates all parameters. A rank reads the features of its tables for the rows of all
  ranks, as the example does ("as fed"), or all features of its rows, as torchrec does, and they
  are sent to the ranks of the tables while the batches before are computed ("distributed").

The optimizer is Adagrad for all parameters of both: a row that was not looked up stays as it is
whether it has a gradient of zeros or none, which is not so with Adam, and fbgemm has no Adam for
CPUs. What is in the batches is drawn and joined beforehand for both. Gradients of whole tables
cost what the tables have rows: ``--table`` shows it.
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
# Steps of each turn: what one side leaves to be sent meanwhile is a small part of the other's time.
STEPS = 5


def pinned(batch: Batch, place: Place) -> Batch:
    """In pinned memory, where it is to be copied to a GPU."""
    if place.device.type == "cpu":
        return batch
    features = batch.features.pin_memory()
    return Batch(batch.dense.pin_memory(), batch.labels.pin_memory(), features)


class Ours:
    """The example's step with all passes, at each call."""

    def __init__(self, sizes: Sizes, place: Place, rule: Rule, sample: Batch) -> None:
        self.place = place
        self.batches: Iterator[Batch] = iter(())
        self.model = make(sizes, place)
        given = sample.to(place.device)
        tvmbridge.optimize_fx(self.model, (given.dense, given.features), measure=False)
        self.step = Step(self.model, place)
        self.step.optimizer = rule.dense(self.model.parameters())

    def __call__(self) -> torch.Tensor:
        """The loss of this rank's rows."""
        return self.step(next(self.batches).to(self.place.device))

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's, by name."""
        return dict(self.model.named_parameters())


def sides(
    sizes: Sizes, place: Place, rule: Rule, by_rows: Sequence[Batch], by_tables: Sequence[Batch]
) -> dict[str, Pipelined | Ours]:
    """What is compared, on the same rows in the same order."""
    fed, distributed = (Ours(sizes, place, rule, by_tables[0]) for _ in range(2))
    fed.batches = itertools.cycle(by_tables)
    distributed.batches = Distribution(sizes, place).ahead(itertools.cycle(by_rows))
    return {
        "torchrec": Pipelined(sizes, place, rule, by_rows),
        "tvmbridge, as fed": fed,
        "tvmbridge, distributed": distributed,
    }


def mean(loss: torch.Tensor) -> float:
    """Over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def largest(errors: Sequence[float]) -> float:
    """Of all ranks; NaN if one has NaN."""
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, float(torch.tensor(errors).max()))
    return float(torch.tensor(every).max())


def turn(call: Callable[[], Any], place: Place) -> Callable[[], None]:
    """So many steps, until the device is done."""

    def run() -> None:
        for _ in range(STEPS):
            call()

    return synchronized(run, place)


def spread(name: str, values: Sequence[float], unit: str, bound: float | None = None) -> Row:
    """The median of what the rounds gave, with the quartiles beside its name."""
    low, median, high = statistics.quantiles(values, n=4)
    return Row(f"{name} (quartiles {low:.3g}, {high:.3g})", median, unit, bound)


def undivided(
    sizes: Sizes, batch: Batch, place: Place
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, parameters and gradients of one module in float64 on the rows of all ranks."""
    model = make(sizes, Place(0, 1, torch.device("cpu"))).double()
    model.names = tuple(by_rank(sizes, place.world))
    logits = model(batch.dense.double(), batch.features)
    loss = nn.BCEWithLogitsLoss()(logits, batch.labels.double())
    loss.backward()
    before = {name: p.detach() for name, p in model.named_parameters()}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), before, gradients


def proven(sizes: Sizes, rows: int, place: Place) -> list[Row]:
    """Loss and gradients of one step of both, beside the undivided model; the largest errors.

    What a step of SGD changes, over its rate, is the gradient. The rate is so large that rounding
    the changed weight does not hide it.
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
    """Losses of steps with Adagrad, and the medians of later steps in turns, on this rank."""
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
    """Rank 0 prints."""
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

"""A training step of the DLRM with the fx passes, over that of torchrec's pipeline, on two ranks.

Run by ``torchrun --nproc-per-node 2 -m benchmarks.recommender_torchrec`` where torchrec and fbgemm
are installed: on GPUs by NCCL where there are any, otherwise on CPUs by gloo. Both train the model
of ``examples/dlrm`` from the same weights on the same rows; before anything is timed, a step of
each is held against the undivided model in float64, and steps with Adagrad against each other.

Either side does what it does by itself:

- torchrec: ``TrainPipelineSparseDist`` over ``DistributedModelParallel``. Each rank reads all
  features of its rows, and the pipeline sends them to the ranks of the tables while the batch
  before is computed. All tables of a rank are one lookup, which updates them within backward, the
  rows that were looked up alone. ``DistributedDataParallel`` adds up the other gradients.
- tvmbridge: the example's step with all passes. Tables have gradients of their whole size, and one
  optimizer updates all parameters. A rank reads the features of its tables for the rows of all
  ranks, as the example does ("as fed"), or all features of its rows, as torchrec does, and sends
  them to the others within the step, without any overlap ("with the input's distribution").

The optimizer is Adagrad for all parameters of both: a row that was not looked up stays as it is
whether it has a gradient of zeros or none, which is not so with Adam, and fbgemm has no Adam for
CPUs. What is in the batches is drawn and joined beforehand for both.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tvmbridge
from benchmarks.common import Row, alternate, parser, report
from benchmarks.recommender_keyed import Pipelined, Rule, by_rank
from benchmarks.recommender_step import synchronized
from examples.dlrm.clicks import Batch, Clicks
from examples.dlrm.model import Sizes
from examples.dlrm.train import Place, Step, join, make
from tvmbridge.fx.sparse_features import CombinedFeatures

BATCHES = 8
# Steps of each turn: what one side leaves to be sent meanwhile is a small part of the other's time.
STEPS = 5


def of_rows(whole: Batch, sizes: Sizes, place: Place) -> Batch:
    """A rank's rows of a batch of all ranks, with all their features, in the order of the ranks."""
    rows = len(whole.labels) // place.world
    own = slice(place.rank * rows, (place.rank + 1) * rows)
    features, indices, lengths = whole.features.separate(), [], []
    names = by_rank(sizes, place.world)
    for name in names:
        per_row = features[name].indices.split(features[name].lengths.tolist())
        indices.append(torch.cat(per_row[own]))
        lengths.append(features[name].lengths[own])
    splits = torch.tensor([len(part) for part in indices])
    joined = CombinedFeatures(names, torch.cat(indices), torch.stack(lengths), splits)
    return Batch(whole.dense[own], whole.labels[own], joined)


def pinned(batch: Batch, place: Place) -> Batch:
    """In pinned memory, where it is to be copied to a GPU."""
    if place.device.type == "cpu":
        return batch
    return Batch(*(p.pin_memory() for p in (batch.dense, batch.labels, batch.features)))


def distributed(batch: Batch, sizes: Sizes, place: Place) -> Batch:
    """The features of this rank's tables for all rows, from all features of this rank's rows."""
    given, world = batch.features, place.world
    rows, counts = given.lengths.shape[1], [len(sizes.of_rank(r, world)) for r in range(world)]
    own = counts[place.rank]
    lengths = given.lengths.new_empty(world, own, rows)
    sent = [count * rows for count in counts]
    dist.all_to_all_single(lengths.view(-1), given.lengths.view(-1), [own * rows] * world, sent)
    pieces = lengths.sum(2).cpu()
    received = pieces.sum(1).tolist()
    indices = given.indices.new_empty(sum(received))
    sent = [int(part.sum()) for part in given.splits.split(counts)]
    dist.all_to_all_single(indices, given.indices, received, sent)
    parts = indices.split(pieces.flatten().tolist())
    ordered = torch.cat([parts[r * own + table] for table in range(own) for r in range(world)])
    joined = lengths.transpose(0, 1).reshape(own, world * rows)
    names = sizes.of_rank(place.rank, world)
    features = CombinedFeatures(names, ordered, joined, pieces.sum(0))
    return Batch(batch.dense, batch.labels, features)


class Ours:
    """The example's step with all passes, at each call: from batches as fed, or distributed."""

    def __init__(self, sizes: Sizes, place: Place, rule: Rule, sample: Batch) -> None:
        self.sizes, self.place = sizes, place
        self.model = make(sizes, place)
        given = sample.to(place.device)
        tvmbridge.optimize_fx(self.model, (given.dense, given.features), measure=False)
        self.step = Step(self.model, place)
        self.step.optimizer = rule.dense(self.model.parameters())

    def as_fed(self, batches: Sequence[Batch]) -> Callable[[], torch.Tensor]:
        """Steps on batches that have the features of this rank's tables."""
        given = itertools.cycle(batches)
        return lambda: self.step(next(given).to(self.place.device))

    def with_distribution(self, batches: Sequence[Batch]) -> Callable[[], torch.Tensor]:
        """Steps on batches that have all features of this rank's rows."""
        given = itertools.cycle(batches)

        def run() -> torch.Tensor:
            own = next(given).to(self.place.device)
            return self.step(distributed(own, self.sizes, self.place))

        return run


def mean(loss: torch.Tensor) -> float:
    """Over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def largest(error: float) -> float:
    """Of the ranks; NaN if one has NaN."""
    every = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, error)
    return float(torch.tensor(every).max())


def turn(call: Callable[[], Any], place: Place) -> Callable[[], None]:
    """So many steps, until the device is done."""

    def run() -> None:
        for _ in range(STEPS):
            call()

    return synchronized(run, place)


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
    own = of_rows(whole, sizes, place)
    fed = Clicks(sizes, rows, place.rank, place.world)[0]
    theirs = Pipelined(sizes, place, rule, [own])
    ours, sent = Ours(sizes, place, rule, fed), Ours(sizes, place, rule, fed)
    sides: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], Any]]] = {
        "torchrec": (theirs, theirs.parameters),
        "tvmbridge": (ours.as_fed([fed]), lambda: dict(ours.model.named_parameters())),
        "distributed": (sent.with_distribution([own]), lambda: dict(sent.model.named_parameters())),
    }
    found = []
    for name, (step, parameters) in sides.items():
        error = abs(mean(step()) - loss) / abs(loss)
        after = {n: p.detach().cpu().double() for n, p in parameters().items()}
        tables = {n for n in after if n.startswith("tables.")}
        assert tables == {f"tables.{n}.weight" for n in sizes.of_rank(place.rank, place.world)}
        assert set(after) - tables == {n for n in before if not n.startswith("tables.")}
        errors = [
            float(((before[n] - p) / rule.rate - gradients[n]).norm() / gradients[n].norm())
            for n, p in after.items()
        ]
        found.append(Row(f"loss of a step, {name}", error, "of float64", 1e-6))
        found.append(Row(f"gradients, {name}", largest(max(errors)), "of float64", 1e-5))
    return found


def measure(sizes: Sizes, rows: int, rounds: int, place: Place) -> list[Row]:
    """Losses of steps with Adagrad, and the medians of later steps in turns, on this rank."""
    whole, own = Clicks(sizes, rows * place.world), Clicks(sizes, rows, place.rank, place.world)
    by_rows = [pinned(of_rows(whole[i], sizes, place), place) for i in range(BATCHES)]
    by_tables = [pinned(own[i], place) for i in range(BATCHES)]
    rule = Rule("Adagrad", 0.02)
    fed, sent = (Ours(sizes, place, rule, by_tables[0]) for _ in range(2))
    calls = {
        "torchrec": Pipelined(sizes, place, rule, by_rows),
        "tvmbridge, as fed": fed.as_fed(by_tables),
        "tvmbridge, with the input's distribution": sent.with_distribution(by_rows),
    }
    losses = [[mean(call()) for _ in range(BATCHES)] for call in calls.values()]
    apart = max(abs(ours - losses[0][i]) for side in losses[1:] for i, ours in enumerate(side))
    turns = alternate([turn(call, place) for call in calls.values()], rounds=rounds)
    times = [seconds / STEPS for seconds in turns]
    for side in (fed, sent):
        report_ = tvmbridge.fx_report(side.model)
        assert not report_.fallbacks, report_
    found = [Row(f"losses of {BATCHES} steps with Adagrad, apart", apart, "", 1e-4)]
    found += [Row(name, t * 1e3, "ms") for name, t in zip(calls, times, strict=True)]
    pairs = list(zip(calls, times, strict=True))[1:]
    return found + [Row(name, t / times[0], "of torchrec", 1.0) for name, t in pairs]


def main(argv: Sequence[str] = ()) -> int:
    """Rank 0 prints."""
    options = parser(__doc__)
    options.add_argument("--features", type=int, nargs="+", default=[26, 100])
    options.add_argument("--rows", type=int, default=512, help="of a batch, on each rank")
    options.add_argument("--rounds", type=int, default=40)
    chosen = options.parse_args(argv)
    place = join()
    status = 0
    for features in chosen.features:
        sizes = Sizes(features=features)
        found = proven(sizes, chosen.rows, place)
        found += measure(sizes, chosen.rows, chosen.rounds, place)
        if not place.rank:
            title = f"DLRM, {features} features, on {place.world} {place.device.type} ranks"
            status |= report(title, found, check=not chosen.no_check)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

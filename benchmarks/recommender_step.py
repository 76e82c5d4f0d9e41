"""A training step of the DLRM on several ranks, with and without overlapped communication.

``torchrun --nproc-per-node 2 -m benchmarks.recommender_step`` uses NCCL if there are GPUs, and
otherwise gloo on CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import tvmbridge
from benchmarks.common import Row, alternate, parser, report
from examples.dlrm.clicks import Batch, Clicks
from examples.dlrm.model import DLRM, Sizes
from examples.dlrm.train import Place, Step, join, make
from tvmbridge.passes.fx.base import copied
from tvmbridge.passes.fx.combine_sparse_inputs import CombineSparseInputs
from tvmbridge.passes.fx.feature_fusion import FeatureFusion
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion
from tvmbridge.passes.fx.overlap_communication import OverlapCommunication, is_collective


def synchronized(call: Callable[[], Any], place: Place) -> Callable[[], None]:
    """Return a function that calls ``call`` and waits until the device is done."""

    def run() -> None:
        call()
        if place.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def alone(own: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> Any:
    """Replace an all-to-all: return as many elements as it would, without communication."""
    missing = sum(received) - own.numel()
    if missing <= 0:
        return own[: sum(received)]
    return torch.cat([own, own.new_zeros(missing)])


def without_communication(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph whose all-to-all is replaced by :func:`alone`."""
    made = copied(graph_module)
    for node in made.graph.nodes:
        if is_collective(node):
            node.target = alone
        elif node.target is torch.ops._c10d_functional.wait_tensor.default:
            node.replace_all_uses_with(node.args[0])
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def exchange(model: DLRM, rows: int) -> Callable[[], None]:
    """Return a function that runs a step's communication alone.

    It runs the all-to-all forward and backward, and the all-reduce of replicated gradients.
    """
    own = torch.randn(
        rows * model.world, len(model.names) * model.sizes.width, device=model.pairs.device
    ).requires_grad_()
    count = sum(p.numel() for p in model.replicated())
    flat = torch.zeros(count, device=own.device)

    def run() -> None:
        model._exchanged(own, rows).sum().backward()
        dist.all_reduce(flat)

    return run


class Variants:
    """Steps of one model with several variants of its graph, which share one trace."""

    def __init__(self, sizes: Sizes, batch: Batch, place: Place) -> None:
        model, passes = make(sizes, place), (CombineSparseInputs(), FeatureFusion())
        sample = (batch.dense, batch.features)
        tvmbridge.optimize_fx(model, sample, (*passes, HorizontalFusion()), measure=False)
        ((self._entry,),) = model.forward.entries.values()  # type: ignore[union-attr,operator]
        graph = self._entry.graph_module
        self._graphs = {
            "overlap off": graph,
            "overlap on": OverlapCommunication()(graph).graph_module,
            "computation": without_communication(graph),
        }
        together, alone = Step(model, place), Step(model, Place(0, 1, place.device))
        self._steps = dict.fromkeys(self._graphs, together) | {"computation": alone}

    def calls(self, batch: Batch) -> dict[str, Callable[[], Any]]:
        """Return a function for each variant, by name, that runs a step on ``batch``."""
        return {name: partial(self._run, name, batch) for name in self._graphs}

    def _run(self, name: str, batch: Batch) -> None:
        self._entry.graph_module = self._graphs[name]
        self._steps[name](batch)


def measure(sizes: Sizes, counts: Sequence[int], rounds: int, place: Place) -> Iterator[Row]:
    """Yield this rank's medians of steps called in turns, for batches of each row count."""
    batches = [Clicks(sizes, n, place.rank, place.world)[0].to(place.device) for n in counts]
    eager, variants = make(sizes, place), Variants(sizes, batches[0], place)
    step = Step(eager, place)
    for rows, batch in zip(counts, batches, strict=True):
        calls = {"eager": partial(step, batch), **variants.calls(batch)}
        calls["communication"] = exchange(eager, rows)
        times = alternate([synchronized(c, place) for c in calls.values()], rounds=rounds)
        title = f"{sizes.features} features of {sizes.width}, {rows} rows"
        yield from rows_of(title, dict(zip(calls, times, strict=True)), place)


def rows_of(title: str, found: Mapping[str, float], place: Place) -> Iterator[Row]:
    """Yield the rows of one batch size, from the median seconds of each variant."""
    longer = max(found["computation"], found["communication"])
    on_gpu = place.device.type == "cuda"
    for name, seconds in found.items():
        yield Row(f"{title}: {name}", seconds * 1e3, "ms")
    on, overlapped = found["overlap on"], f"{title}: overlap on"
    yield Row(overlapped, on / longer, "of the longer part", 1.1 if on_gpu else None)
    yield Row(overlapped, on / found["overlap off"], "of overlap off")
    yield Row(f"{title}: whole step", on / found["eager"], "of eager", 0.4 if on_gpu else None)


def main(argv: Sequence[str] = ()) -> int:
    """Measure on all ranks; rank 0 prints the table."""
    options = parser(__doc__)
    options.add_argument("--features", type=int, default=200)
    options.add_argument("--width", type=int, default=Sizes.width, help="of an embedding")
    options.add_argument("--rows", type=int, nargs="*", default=[512], help="of a rank's batch")
    options.add_argument("--rounds", type=int, default=20)
    chosen = options.parse_args(argv)
    place = join()
    sizes = Sizes(features=chosen.features, width=chosen.width)
    found = list(measure(sizes, chosen.rows, chosen.rounds, place))
    status = 0
    if not place.rank:
        title = f"DLRM on {place.world} {place.device.type} ranks"
        status = report(title, found, check=not chosen.no_check)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

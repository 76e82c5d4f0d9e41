"""A step of the DLRM on several ranks, with communication overlapped and not.

Run by ``torchrun --nproc-per-node 2 -m benchmarks.recommender_step``: on GPUs by NCCL where there
are any, otherwise on CPUs by gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import tvmbridge
from benchmarks.common import Row, alternate, parser, report
from examples.dlrm.clicks import Clicks
from examples.dlrm.model import DLRM, Sizes
from examples.dlrm.train import Place, Step, join, make
from tvmbridge.passes.fx.base import copied
from tvmbridge.passes.fx.combine_sparse_inputs import CombineSparseInputs
from tvmbridge.passes.fx.feature_fusion import FeatureFusion
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion
from tvmbridge.passes.fx.overlap_communication import OverlapCommunication, is_collective


def synchronized(call: Callable[[], Any], place: Place) -> Callable[[], None]:
    """``call``, until the device is done."""

    def run() -> None:
        call()
        if place.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def alone(own: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> Any:
    """In the place of an all-to-all: as many elements, without communication."""
    missing = sum(received) - own.numel()
    if missing <= 0:
        return own[: sum(received)]
    return torch.cat([own, own.new_zeros(missing)])


def without_communication(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same computation without its all-to-all."""
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
    """The all-to-all of a step alone, forward and backward, and the mean of gradients."""
    own = torch.randn(
        rows * model.world, len(model.names) * model.sizes.width, device=model.pairs.device
    ).requires_grad_()
    count = sum(p.numel() for p in model.replicated())
    flat = torch.zeros(count, device=own.device)

    def run() -> None:
        model._exchanged(own, rows).sum().backward()
        dist.all_reduce(flat)

    return run


def measure(features: int, rows: int, rounds: int, place: Place) -> list[Row]:
    """Medians of steps in turns, on this rank."""
    sizes = Sizes(features=features)
    batch = Clicks(sizes, rows, place.rank, place.world)[0].to(place.device)
    sample = (batch.dense, batch.features)
    passes = (CombineSparseInputs(), FeatureFusion(), HorizontalFusion())
    eager, model = make(sizes, place), make(sizes, place)
    tvmbridge.optimize_fx(model, sample, passes, measure=False)
    # One trace serves all: only the graph that its entry runs is exchanged.
    ((entry,),) = model.forward.entries.values()  # type: ignore[union-attr,operator]
    graph = entry.graph_module
    graphs = {"overlap off": graph, "overlap on": OverlapCommunication()(graph).graph_module}
    graphs["computation"] = without_communication(graph)
    step = Step(model, place)
    steps = dict.fromkeys(graphs, step) | {"computation": Step(model, Place(0, 1, place.device))}

    def run(name: str) -> None:
        entry.graph_module = graphs[name]
        steps[name](batch)

    eager_step = Step(eager, place)
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: eager_step(batch)}
    calls |= {name: partial(run, name) for name in graphs}
    calls["communication"] = exchange(eager, rows)
    times = alternate([synchronized(c, place) for c in calls.values()], rounds=rounds)
    found = dict(zip(calls, times, strict=True))
    longer = max(found["computation"], found["communication"])
    result = [Row(f"{name}, {features} features", t * 1e3, "ms") for name, t in found.items()]
    bound = 1.1 if place.device.type == "cuda" else None
    result.append(Row("overlap on", found["overlap on"] / longer, "of the longer part", bound))
    result.append(Row("overlap on", found["overlap on"] / found["overlap off"], "of overlap off"))
    result.append(
        Row("whole step", found["overlap on"] / found["eager"], "of eager", bound and 0.4)
    )
    return result


def main(argv: Sequence[str] = ()) -> int:
    """Rank 0 prints."""
    options = parser(__doc__)
    options.add_argument("--features", type=int, default=200)
    options.add_argument("--rows", type=int, default=512)
    options.add_argument("--rounds", type=int, default=20)
    chosen = options.parse_args(argv)
    place = join()
    found = measure(chosen.features, chosen.rows, chosen.rounds, place)
    status = 0
    if not place.rank:
        title = f"DLRM on {place.world} {place.device.type} ranks"
        status = report(title, found, check=not chosen.no_check)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

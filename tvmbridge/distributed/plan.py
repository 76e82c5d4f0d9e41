"""The plan of a pipeline: the cuts of a module, the cost of each stage, the predicted step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.core.errors import PipelineError
from tvmbridge.core.text_console import text_console
from tvmbridge.core.torch_private import pytree
from tvmbridge.distributed.batches import as_arguments, split
from tvmbridge.distributed.boundaries import boundaries, cuts_by_hand, nodes_of
from tvmbridge.distributed.graph import PipelineGraph, capture_graph, submodule_of
from tvmbridge.distributed.measuring import measure
from tvmbridge.distributed.orders import Durations, Orders, Timeline, orders, predict, problem
from tvmbridge.distributed.partition import DeviceLimits, Partition, Search

Stages = int | Sequence[str] | Mapping[str, int] | None

# The assumed latency (seconds) and bandwidth (bytes a second) between two devices of one host.
_LINKS = {"cuda": (20e-6, 100e9), "cpu": (300e-6, 2e9)}


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    - ``rank``: the rank that runs it.
    - ``begins``: the name of the submodule or node that it begins with.
    - ``operators``, ``parameters``: their numbers.
    - ``durations``: seconds for one micro-batch.
    - ``received_bytes``: bytes that it receives for one micro-batch.
    """

    rank: int
    begins: str
    operators: int
    parameters: int
    durations: Durations
    received_bytes: int


@dataclass(frozen=True)
class Plan:
    """The stages of a module, and the prediction of a step.

    - ``positions``: the positions in the captured graph at which stages begin.
    - ``orders``: the order of each rank's work.
    - ``memory``: predicted bytes of each rank.
    - ``tied``: the names of parameters that stages on several ranks share.
    """

    schedule: str
    microbatches: int
    positions: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    orders: Orders
    memory: tuple[int, ...]
    tied: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """The number of devices."""
        return len(self.orders)

    def predicted(self) -> Timeline:
        """Return the timeline of a step, predicted from the measured times of the parts."""
        return predict(self.orders, [s.durations for s in self.stages])

    @property
    def balance(self) -> float:
        """The mean time of the devices over the longest: 1 if all take the same time."""
        times = [0.0] * self.ranks
        for stage in self.stages:
            times[stage.rank] += stage.durations.forward + stage.durations.backward
        return sum(times) / (len(times) * max(times)) if max(times) else 1.0

    def __str__(self) -> str:
        from rich.table import Table

        console = text_console()
        table = Table(
            "stage", "rank", "begins with", "operators", "parameters", "forward ms",
            "backward ms", "received KB",
        )  # fmt: skip
        for i, s in enumerate(self.stages):
            table.add_row(
                str(i), str(s.rank), s.begins, str(s.operators), f"{s.parameters:,}",
                f"{1e3 * s.durations.forward:.2f}", f"{1e3 * s.durations.backward:.2f}",
                f"{s.received_bytes / 1e3:.1f}",
            )  # fmt: skip
        console.print(table)
        step = self.predicted()
        ideal = (self.ranks - 1) / (self.microbatches + self.ranks - 1)
        lines = [
            f"schedule {self.schedule}, {self.microbatches} micro-batches, {self.ranks} devices",
            f"balance of the devices {self.balance:.2f}",
            f"predicted step {1e3 * step.seconds:.1f} ms, idle share {step.idle:.3f} "
            f"(stages alike, one a device: {ideal:.3f})",
            "memory a device "
            + ", ".join(f"{m / 1e6:.1f} MB" for m in self.memory)
            + " for parameters, gradients, optimizer state and activations",
        ]
        if self.tied:
            lines.append(
                f"tied between ranks, their gradients are added up: {', '.join(self.tied)}"
            )
        for line in lines:
            console.print(line, soft_wrap=True)
        return console.file.getvalue()


@dataclass(frozen=True)
class MicroBatch:
    """The sample of a pipeline: one micro-batch, as the graph was captured for it."""

    leaves: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(inputs: Any, microbatches: int) -> tuple[MicroBatch, tuple[Any, ...], dict[str, Any]]:
        """Return the first micro-batch of a batch, and its arguments of forward."""
        args, kwargs = as_arguments(split(inputs, microbatches)[0])
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        return MicroBatch(tuple(leaves), spec), args, dict(kwargs)


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for.

    - ``schedule``: the name of the schedule.
    - ``microbatches``: the number of micro-batches of a mini-batch.
    - ``stages``: the stages as the user gives them; see :func:`pipeline`.
    - ``count``: the number of stages.
    - ``ranks``: the number of devices.
    """

    schedule: str
    microbatches: int
    stages: Stages
    count: int
    ranks: int


def plan_pipeline(
    module: nn.Module,
    sample: Any,
    *,
    microbatches: int,
    schedule: str = "interleaved",
    stages: Stages = None,
    ranks: int | None = None,
    device: torch.device | str = "cpu",
    memory: int | None = None,
) -> Plan:
    """Plan the stages of ``module``, their balance, and the predicted idle time; compile nothing.

    Args:
        module: the module in train mode.
        sample: a mini-batch, as ``runner.step`` takes it.
        microbatches: the number of micro-batches that a mini-batch is cut into.
        schedule: ``"simple"``, ``"interleaved"`` or ``"zero_bubble"``.
        stages: the number of stages, the names of submodules that begin stages, or a dict from
            names of submodules to stages, as for :func:`pipeline`; None: one stage a device.
        ranks: the number of devices; None: one for each stage.
        device: the device that the parts are measured on.
        memory: bytes that a device has, None for no limit.

    Raises:
        PipelineError: there is no such cut or schedule, or the sample cannot be cut.
        CaptureError: torch.export cannot capture the module.
    """
    chosen, args, kwargs = MicroBatch.of(sample, microbatches)
    graph = capture_graph(module, args, kwargs)
    wanted = count_stages(stages, ranks)
    request = PlanRequest(schedule, microbatches, stages, wanted, ranks or wanted)
    return make_plan(graph, chosen, request, torch.device(device), memory)


def count_stages(stages: Stages, ranks: int | None) -> int:
    """Return the number of stages that ``stages`` and ``ranks`` ask for.

    Raises:
        PipelineError: neither gives a number, or ``stages`` is not valid.
    """
    if isinstance(stages, bool) or (isinstance(stages, int) and stages < 1):
        raise PipelineError(f"stages is {stages!r}; give a number, names of submodules, or a dict")
    if isinstance(stages, int):
        return stages
    if isinstance(stages, Mapping):
        return max(ranks or 1, max(stages.values(), default=0) + 1)
    if isinstance(stages, str):
        raise PipelineError(f"stages is {stages!r}; give a list of names")
    if stages is not None:
        return len(stages) + 1
    if ranks is None:
        raise PipelineError("say how many stages, or how many devices (ranks)")
    return ranks


def make_plan(
    graph: PipelineGraph,
    sample: MicroBatch,
    request: PlanRequest,
    device: torch.device,
    memory: int | None,
) -> Plan:
    """Plan the stages of a captured graph; see :func:`plan_pipeline`."""
    stages, count = request.stages, request.count
    schedule = (request.schedule, count, request.ranks, request.microbatches)
    wrong = problem(*schedule)
    if wrong is not None:
        raise PipelineError(wrong)
    order = orders(*schedule)
    by_hand = stages is not None and not isinstance(stages, (int, Mapping))
    if by_hand:
        inner = cuts_by_hand(graph, list(stages))  # type: ignore[arg-type]
    else:
        inner = boundaries(graph, count - 1) if count > 1 else []
    positions = [0, *inner]
    costs = measure(graph, positions, sample.leaves, device)
    machine = DeviceLimits(*_LINKS.get(device.type, _LINKS["cpu"]), memory=memory)
    pinned = _pinned(graph, positions, stages) if isinstance(stages, Mapping) else None
    search = Search(costs, order, count, machine, pinned)
    partition = search.evaluate(range(len(positions)), fitting=False) if by_hand else search.best()
    assert partition is not None
    return _described(graph, request.schedule, request.microbatches, positions, partition, search)


def every_plan(
    graph: PipelineGraph, sample: MicroBatch, like: Plan, device: torch.device
) -> list[Plan]:
    """Return the plans of all cuts that the automatic search considers, without a memory limit."""
    count = len(like.stages)
    positions = [0, *boundaries(graph, count - 1)]
    costs = measure(graph, positions, sample.leaves, device)
    machine = DeviceLimits(*_LINKS.get(device.type, _LINKS["cpu"]))
    search = Search(costs, like.orders, count, machine)
    partitions = [search.evaluate(starts, fitting=False) for starts in search.every()]
    return [
        _described(graph, like.schedule, like.microbatches, positions, p, search)
        for p in partitions
        if p is not None
    ]


def _pinned(
    graph: PipelineGraph, positions: Sequence[int], stages: Mapping[str, int]
) -> dict[int, int]:
    """Return the stage of each part that a pinned submodule runs in."""
    found: dict[int, int] = {}
    for name, stage in stages.items():
        for node in nodes_of(graph, name):
            part = sum(p <= node for p in positions) - 1
            if found.setdefault(part, stage) != stage:
                raise PipelineError(
                    f"{name} is pinned to stage {stage}, and shares a part that cannot be cut with "
                    f"what is pinned to stage {found[part]}"
                )
    return found


def _described(
    graph: PipelineGraph,
    schedule: str,
    microbatches: int,
    positions: Sequence[int],
    partition: Partition,
    search: Search,
) -> Plan:
    starts = [positions[s] for s in partition.starts]
    ends = [*starts[1:], len(graph.nodes)]
    described = []
    users: dict[int, tuple[str, set[int]]] = {}
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        parameters = _parameters(graph, start, end)
        for key, name in parameters.items():
            users.setdefault(key, (name, set()))[1].add(search.rank_of[i])
        described.append(
            StagePlan(
                rank=search.rank_of[i],
                begins=submodule_of(graph.nodes[start]) or graph.nodes[start].name,
                operators=end - start,
                parameters=sum(graph.tensors[name].numel() for name in parameters.values()),
                durations=partition.durations[i],
                received_bytes=search.costs[partition.starts[i]].received,
            )
        )
    return Plan(
        schedule=schedule,
        microbatches=microbatches,
        positions=tuple(starts),
        stages=tuple(described),
        orders=search.plan,
        memory=partition.memory,
        tied=tuple(name for name, ranks in users.values() if len(ranks) > 1),
    )


def _parameters(graph: PipelineGraph, start: int, end: int) -> dict[int, str]:
    """Return the names of the parameters that the nodes read, by the parameters' ids."""
    found: dict[int, str] = {}
    for node in graph.nodes[start:end]:
        for name in graph.read_tensors(node):
            if isinstance(graph.tensors[name], nn.Parameter):
                found.setdefault(id(graph.tensors[name]), name)
    return found

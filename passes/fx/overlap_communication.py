"""OverlapCommunication: a collective begins when its input is ready, and ends before its first use.

    a = all_to_all_single(x)                  a = request(x)
    b = wait_tensor(a)                        d = dense(y)
    d = dense(y)                       ->     b = wait(a)
    e = f(b, d)                               e = f(b, d)

Requires: the functional collectives of torch.distributed; all ranks apply the pass, which checks
that they have the same collectives. Guarantees: all ranks run their collectives in the same order,
in backward too. Runs after all other passes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tvmbridge.core.collectives import is_exchange
from tvmbridge.core.errors import PassError
from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.reached import reached
from tvmbridge.core.torch_private import process_group
from tvmbridge.passes.fx.base import FxPass, bound_arguments, is_operator, value_of
from tvmbridge.passes.fx.collectives import NAMES, NAMESPACES, Collective, request, wait
from tvmbridge.passes.fx.effects import arrange, needs, ordered, written
from tvmbridge.passes.fx.peers import exchange


@dataclass(frozen=True)
class OverlapCommunication(FxPass):
    """While a collective is under way, run operators that do not need its result.

    Args:
        durations: seconds that each node takes, by name, collectives included
            (:func:`durations_of` measures them). A wait then moves no further than the collective
            lasts. If empty, a wait moves as far as it can.
        check: whether to compare the collectives of all ranks; every rank must apply the pass then.
        split: whether collectives become ``request`` and ``wait``, which have gradients. If not,
            they stay PyTorch's operators, for a graph that is not differentiated.
    """

    durations: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    check: bool = True
    split: bool = True

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Split each collective into a request and a wait, and move both.

        Raises:
            PassError: the ranks have different collectives.
        """
        graph = graph_module.graph
        found = [n for n in graph.nodes if is_collective(n)]
        if self.check:
            check_across_ranks(found)
        touched, pairs = written(graph), []
        for node in found:
            if node.all_input_nodes[0] in touched:
                report.decline(node.name, "what it sends is written in place")
                continue
            waits = [u for u in node.users if _is_wait(u)]
            if len(waits) == 1 and len(node.users) == 1:
                pairs.append((node, waits[0]))
            else:
                report.decline(node.name, "its result is not read by one wait alone")
        if not pairs or len(pairs) < len(found):
            if not found:
                report.decline("the graph", "it has no functional collective")
            return
        known = {node for pair in pairs for node in pair}
        unknown = [n for n in graph.nodes if is_exchange(n.target) and n not in known]
        if unknown:
            report.decline(unknown[0].name, "it may have to keep its place among the collectives")
            return
        requests, waits = [n for n, _ in pairs], [w for _, w in pairs]
        if self.split:
            requests, waits = _split(graph, pairs)
        chain = ordered(graph)
        order = _schedule(graph, [chain, requests, waits], requests, waits, self.durations)
        moved = _between(order, requests, waits) - _between(list(graph.nodes), requests, waits)
        arrange(order)
        report.rewrote(max(len(pairs), moved))

    def abandon(self, error: BaseException) -> None:
        """Report to the other ranks, which compare collectives, that this rank has no graph."""
        if self.check:
            exchange(f"{type(error).__name__}: {error}")


def is_collective(node: fx.Node) -> bool:
    """Whether the node begins a functional collective."""
    if not is_operator(node):
        return False
    target: Any = node.target
    namespace, _, name = target._schema.name.partition("::")
    return namespace in NAMESPACES and name in NAMES


def _is_wait(node: fx.Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def check_across_ranks(found: list[fx.Node]) -> None:
    """Compare the collectives of this rank's graph with those of the other ranks.

    Raises:
        PassError: the collectives differ; it is raised on every rank.
    """
    own: dict[str, tuple[list[int], list[str]]] = {}
    for node in found:
        group = bound_arguments(node)["group_name"]
        name, ranks = _ranks(group)
        own.setdefault(name, (ranks, []))[1].append(_described(node))
    everyone = exchange(own)
    for rank, given in enumerate(everyone):
        if isinstance(given, str):
            raise PassError(f"rank {rank} has no graph: {given}")
    for given in everyone:
        for name, (ranks, _) in given.items():
            calls = {r: everyone[r].get(name, (ranks, []))[1] for r in ranks if r < len(everyone)}
            first = min(calls)
            for rank, theirs in calls.items():
                if theirs != calls[first]:
                    raise PassError(_difference(name, first, calls[first], rank, theirs))


def _difference(name: str, first: int, own: list[str], rank: int, theirs: list[str]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), None)
    text = f"the ranks have different collectives in group {name}: "
    if place is None:
        return text + f"rank {first} has {len(own)}, rank {rank} has {len(theirs)}"
    return text + f"number {place} is {own[place]} on rank {first}, {theirs[place]} on rank {rank}"


def _ranks(group: Any) -> tuple[str, list[int]]:
    if not (dist.is_available() and dist.is_initialized()):
        return str(group), [0]
    resolved = process_group(group) if isinstance(group, str) else group
    return str(resolved.group_name), dist.get_process_group_ranks(resolved)


def _described(node: fx.Node) -> str:
    target: Any = node.target
    given = bound_arguments(node)
    value = value_of(node)
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    name = target._schema.name.partition("::")[2]
    return f"{name}({given.get('reduce_op', '')}{dtype})"


def _split(
    graph: fx.Graph, pairs: list[tuple[fx.Node, fx.Node]]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Replace collectives and their waits by calls of ``request`` and ``wait``; return both."""
    requests, waits = [], []
    token: fx.Node | None = None
    for node, waited in pairs:
        given = bound_arguments(node)
        collective = Collective.of(node.target, given.get("reduce_op", ""), given["group_name"])
        sizes: Any = given.get("output_split_sizes") or [given.get("group_size", 0)]
        rest: tuple[Any, ...] = (collective.plain, sizes, given.get("input_split_sizes", ()))
        with graph.inserting_before(node):
            begun = graph.call_function(request, (given["input"], *rest))
        begun.meta = dict(node.meta)
        with graph.inserting_before(waited):
            ended = graph.call_function(wait, (begun, token, *rest))
            value = graph.call_function(operator.getitem, (ended, 0))
            token = graph.call_function(operator.getitem, (ended, 1))
        value.meta = dict(waited.meta)
        waited.replace_all_uses_with(value)
        graph.erase_node(waited)
        graph.erase_node(node)
        requests.append(begun)
        waits.append(ended)
    if token is not None:
        graph.erase_node(token)
    return requests, waits


def _schedule(
    graph: fx.Graph,
    chains: list[list[fx.Node]],
    requests: list[fx.Node],
    waits: list[fx.Node],
    durations: Mapping[str, float],
) -> list[fx.Node]:
    """Return all nodes in an order in which requests come early and waits late.

    Nodes that a request depends on come before all others. A wait comes when, by ``durations``,
    its collective has ended, or when nothing else can run.

    Args:
        chains: lists of nodes that must keep their order.
        durations: seconds that each node takes, by name.

    Raises:
        PassError: there is no such order.
    """
    before = needs(graph, chains)
    nodes = list(graph.nodes)
    places = {n: i for i, n in enumerate(nodes)}
    urgent = _ancestors(requests, before, set(waits))
    ends: dict[fx.Node, float] = {}
    partner = dict(zip(requests, waits, strict=True))
    waiting = set(waits)
    left, done, clock = dict.fromkeys(nodes), set[fx.Node](), 0.0
    order: list[fx.Node] = []

    def rank(node: fx.Node) -> tuple[Any, ...]:
        if node.op == "placeholder":
            return 0, 0, places[node]
        if node.op == "output":
            return 4, 0, places[node]
        if node in waiting and ends.get(node, float("inf")) > clock:
            return 3, 0, places[node]
        return 1, 0 if node in urgent else 1, places[node]

    opened = {n: len(needed) for n, needed in before.items()}
    after: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for node, needed in before.items():
        for each in needed:
            after[each].append(node)
    ready = {n for n in nodes if not opened[n]}
    while ready:
        node = min(ready, key=rank)
        ready.discard(node)
        order.append(node)
        done.add(node)
        clock = max(clock, ends.get(node, 0.0)) if node in waiting and durations else clock
        if node in partner:
            known = durations.get(node.name)
            ends[partner[node]] = float("inf") if known is None else clock + known
        else:
            clock += durations.get(node.name, 0.0)
        for later in after[node]:
            opened[later] -= 1
            if not opened[later]:
                ready.add(later)
    if len(order) < len(left):
        raise PassError("the collectives of the graph cannot be put into one order")
    return order


def _ancestors(
    requests: list[fx.Node], before: Mapping[fx.Node, set[fx.Node]], stop: set[fx.Node]
) -> set[fx.Node]:
    """Return the requests and the nodes that they depend on, without following nodes of ``stop``.

    ``stop`` has the waits, which return the results of other collectives.
    """
    return set(reached(requests, lambda node: before[node] - stop))


def _between(order: list[fx.Node], requests: list[fx.Node], waits: list[fx.Node]) -> int:
    """Return how many nodes are between a request and its wait, summed over all collectives."""
    places = {n: i for i, n in enumerate(order)}
    return sum(places[w] - places[r] - 1 for r, w in zip(requests, waits, strict=True))


def durations_of(
    graph_module: fx.GraphModule, *inputs: Any, rounds: int = 3
) -> Mapping[str, float]:
    """Measure the seconds that each node takes on these inputs, as the minimum over the rounds.

    The time of a collective includes the wait for it. Its name is the one that the pass will give
    to its request. All ranks must call this function, with the graph as it is before the pass.

    Args:
        graph_module: the graph, not yet rewritten by :class:`OverlapCommunication`.
    """
    timer = _Timer(graph_module)
    for _ in range(rounds):
        with torch.no_grad():
            timer.run(*inputs)
    return MappingProxyType(timer.seconds)


class _Timer(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.seconds: dict[str, float] = {}
        self._requests = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph once."""
        self._requests = 0
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record the seconds until the device has finished."""
        start = _now()
        result = super().run_node(n)
        if is_collective(n):
            result = torch.ops._c10d_functional.wait_tensor(result)
        taken = _now() - start
        name = n.name
        if is_collective(n):
            name = "request" if not self._requests else f"request_{self._requests}"
            self._requests += 1
        self.seconds[name] = min(taken, self.seconds.get(name, taken))
        return result


def _now() -> float:
    import time

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()

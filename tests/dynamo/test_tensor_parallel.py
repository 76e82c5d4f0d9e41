"""Graphs of local operators and collectives: their order, and keys of equal parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tvmbridge.core.pass_report import PassReport
from tvmbridge.dynamo.pieces import in_pieces
from tvmbridge.dynamo.tensor_parallel import shared_key
from tvmbridge.passes.fx.overlap_communication import OverlapCommunication

c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def traced(function: Callable[..., torch.Tensor]) -> fx.GraphModule:
    graph_module = make_fx(function, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4))
    for node in graph_module.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    return graph_module


def summed(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", dist.group.WORLD.group_name))


def two_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = summed(x.sin())
    between = y.cos().exp().neg()
    return first + between + summed(y.tan())


def overlapped(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, PassReport]:
    report = PassReport()
    applied = OverlapCommunication(check=False, split=False).apply(graph_module, report)
    return applied.graph_module, report


def names(graph_module: fx.GraphModule) -> list[str]:
    found = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    return [str(n.target).partition(".")[2].partition(".")[0] for n in found]


def test_requests_come_early_and_waits_late() -> None:
    moved, _ = overlapped(traced(two_sums))
    assert names(moved) == [
        *("sin", "all_reduce", "tan", "all_reduce"),
        *("cos", "exp", "neg", "wait_tensor", "add", "wait_tensor", "add"),
    ]
    x, y = torch.rand(2, 4, 4).unbind()
    torch.testing.assert_close(moved(x, y), two_sums(x, y), rtol=0, atol=0)


def test_an_exchange_that_is_not_known_keeps_all_in_their_places() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sent = c10d.broadcast(y, 0, dist.group.WORLD.group_name)
        return two_sums(x, y) + c10d.wait_tensor(sent)

    graph_module = traced(function)
    moved, report = overlapped(graph_module)
    assert moved is graph_module
    assert report.declined == ["broadcast: it may have to keep its place among the collectives"]


def test_pytorch_runs_the_exchanges_between_pieces() -> None:
    pieces: list[list[str]] = []

    def serve(piece: fx.GraphModule) -> Callable[..., object]:
        pieces.append(names(piece))
        return piece.forward

    moved, _ = overlapped(traced(two_sums))
    run = in_pieces(moved, serve)
    assert run is not None
    assert pieces == [["sin"], ["tan"], ["cos", "exp", "neg"], ["add"], ["add"]]
    x, y = torch.rand(2, 4, 4).unbind()
    assert torch.equal(run(x, y), two_sums(x, y))


def test_parts_of_the_same_code_and_inputs_have_one_key() -> None:
    key = shared_key(traced(two_sums))
    assert key is not None
    assert key == shared_key(traced(two_sums))
    assert key != shared_key(traced(lambda x, y: two_sums(y, x)))
    held = traced(two_sums)
    held.weight = torch.ones(4)
    with held.graph.inserting_before():
        held.graph.get_attr("weight")
    assert shared_key(held) is None

"""FeatureFusion: the lookups that become one, those it declines, and unchanged results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from tvmbridge.core.pass_report import PassReport
from tvmbridge.passes.fx.costs import Costs
from tvmbridge.passes.fx.feature_fusion import FeatureFusion

FREE = Costs(launch=1.0, bytes_per_second=1e18)
ROWS, WIDTH = 7, 3


class Bags(nn.Module):
    """A module with embedding bags of several tables, a chain on each, and their concatenation."""

    def __init__(self, count: int = 10, norms: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(count)
        self.bags = nn.ModuleList([nn.EmbeddingBag(ROWS, WIDTH, **options) for _ in range(count)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(count * norms)])
        self.double()

    def forward(self, *given: Any) -> torch.Tensor:
        """Return the result; ``given`` has all tables' indices, then offsets, then any weights."""
        count = len(self.bags)
        parts = [given[i::count] for i in range(count)]
        made = [bag(p[0], p[1], *p[2:]) for bag, p in zip(self.bags, parts, strict=True)]
        if self.norms:
            pairs = zip(self.norms, made, strict=True)
            made = [torch.tanh(norm(each)) for norm, each in pairs]
        return torch.cat(made, 1)


class Rows(nn.Module):
    """A module with several embeddings, looked up by two-dimensional indices."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        tables = [nn.Embedding(ROWS, WIDTH, dtype=torch.float64, **options) for _ in range(8)]
        self.tables = nn.ModuleList(tables)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows; ``x[i]`` has the indices of table ``i``."""
        found = [table(part) for table, part in zip(self.tables, x.unbind(0), strict=True)]
        return torch.stack([torch.relu(each) for each in found], 1)


def sample(count: int, lengths: list[list[int]], weighted: bool = False) -> tuple[Any, ...]:
    """Return indices, offsets and weights of ``count`` tables."""
    draw = torch.Generator().manual_seed(len(lengths[0]))
    sizes = [torch.tensor(each) for each in lengths[:count]]
    indices = [torch.randint(0, ROWS, (int(s.sum()),), generator=draw) for s in sizes]
    weights = [torch.randn(len(i), generator=draw, dtype=torch.float64) for i in indices]
    offsets = [s.cumsum(0) - s for s in sizes]
    return (*indices, *offsets, *(weights if weighted else ()))


def traced(module: nn.Module, args: tuple[Any, ...]) -> fx.GraphModule:
    program = torch.export.export(module, args, strict=False)
    graph_module = program.module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


def declined(module: nn.Module, args: tuple[Any, ...], pass_: FeatureFusion) -> str:
    report, graph_module = PassReport(), traced(module, args)
    result = pass_.apply(graph_module, report)
    assert not result.modified
    assert result.graph_module is graph_module
    return " ".join(report.declined)


def gradients(module: nn.Module, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the result, and the gradient of each parameter."""
    result = module(*args)
    weight = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view_as(result)
    wanted = [p for _, p in sorted(module.named_parameters())]
    return [result, *torch.autograd.grad((result * weight).sum(), wanted)]


def assert_agree(module: nn.Module, args: tuple[Any, ...]) -> fx.GraphModule:
    """Assert that the rewritten graph computes the same as the module; return the graph."""
    result = FeatureFusion(costs=FREE)(traced(copy.deepcopy(module), args))
    assert result.modified
    pairs = zip(gradients(result.graph_module, args), gradients(module, args), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    return result.graph_module


LENGTHS = [
    [2, 0, 3],
    [1, 1, 1],
    [0, 4, 0],
    [0, 0, 0],
    [1, 0, 2],
    [0, 1, 1],
    [0, 0, 1],
    [2, 2, 0],
    [1, 0, 1],
    [0, 2, 0],
]
COUNT = len(LENGTHS)


def test_before_and_after() -> None:
    after = assert_agree(Bags(norms=True), sample(COUNT, LENGTHS))
    called = [n.target for n in after.graph.nodes if n.op == "call_function"]
    assert [str(getattr(t, "__name__", t)) for t in called] == [
        "cat.default",
        "stack.default",
        "view.default",
        "stack.default",
        "view.default",
        "cat.default",
        "sizes_of",
        "on_device",
        "joined_indices",
        "stack.default",
        "joined_offsets",
        "embedding_bag.padding_idx",
        "getitem",
        "unflatten.int",
        "layer_norm.default",
        "addcmul.default",
        "tanh.default",
        "movedim.int",
        "flatten.using_ints",
    ]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_modes(mode: str) -> None:
    assert_agree(Bags(mode=mode), sample(COUNT, LENGTHS))


def test_weights_of_indices() -> None:
    assert_agree(Bags(mode="sum"), sample(COUNT, LENGTHS, weighted=True))


def test_rows() -> None:
    assert_agree(Rows(), (torch.randint(0, ROWS, (8, 3, 2)),))


_ANY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


_LENGTHS = st.integers(1, 4).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(0, 3), min_size=rows, max_size=rows), min_size=9, max_size=11
    )
)


@pytest.mark.slow
@settings(_ANY, max_examples=12)
@given(_LENGTHS)
def test_random_bags(lengths: list[list[int]]) -> None:
    assert_agree(Bags(len(lengths), norms=True), sample(len(lengths), lengths))


def test_the_input_stays_and_twice_changes_nothing() -> None:
    graph_module = traced(Bags(), sample(COUNT, LENGTHS))
    before = str(graph_module.graph)
    once = FeatureFusion(costs=FREE)(graph_module)
    assert str(graph_module.graph) == before
    pairs = zip(once.graph_module.parameters(), graph_module.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert not FeatureFusion(costs=FREE)(once.graph_module).modified


@pytest.mark.parametrize(
    ("module", "costs", "reason"),
    [
        (Bags(sparse=True), FREE, "gradients of the tables are sparse"),
        (Bags(padding_idx=2), FREE, "an index stands for padding"),
        (Bags(scale_grad_by_freq=True), FREE, "scaled by how often an index occurs"),
        (Bags(), Costs(1e-6, 1.0), "the copies would cost more than the launches"),
    ],
)
def test_declined(module: nn.Module, costs: Costs, reason: str) -> None:
    assert reason in declined(module, sample(COUNT, LENGTHS), FeatureFusion(costs=costs))


def test_declined_where_an_offset_is_the_end() -> None:
    given = sample(COUNT, LENGTHS)
    pairs = zip(given[:COUNT], given[COUNT:], strict=True)
    ends = (*given[:COUNT], *(torch.cat([o, torch.tensor([len(i)])]) for i, o in pairs))
    module = Bags(include_last_offset=True)
    assert "the end of the last bag" in declined(module, ends, FeatureFusion(costs=FREE))


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_index_beyond_its_table_is_an_error(wrong: int) -> None:
    args = sample(COUNT, LENGTHS)
    module = Bags()
    after = FeatureFusion(costs=FREE)(traced(copy.deepcopy(module), args)).graph_module
    args[1][0] = wrong
    with pytest.raises((RuntimeError, IndexError)):
        module(*args)
    with pytest.raises((RuntimeError, IndexError)):
        after(*args)


@pytest.mark.parametrize("offsets", [[1, 1, 2], [0, 1, 4]])
def test_bags_beyond_their_indices_are_an_error(offsets: list[int]) -> None:
    args = sample(COUNT, LENGTHS)
    module = Bags()
    after = FeatureFusion(costs=FREE)(traced(copy.deepcopy(module), args)).graph_module
    args[COUNT + 1].copy_(torch.tensor(offsets))
    with pytest.raises(RuntimeError):
        module(*args)
    with pytest.raises(RuntimeError):
        after(*args)

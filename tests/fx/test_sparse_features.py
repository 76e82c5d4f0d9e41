"""Sparse features: collated and checked on the host, and split into views in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import tvmbridge
from tvmbridge.core.pass_report import PassReport
from tvmbridge.fx.collate import SparseCollate, combine
from tvmbridge.fx.rewriting import Rewriting
from tvmbridge.fx.sparse_features import CombinedFeatures, Jagged, SparseFeatures
from tvmbridge.passes.fx.combine_sparse_inputs import (
    CombineSparseInputs,
    Feature,
    split_features,
)

TABLES = {"user": 7, "item": 9, "shop": 5}


def jagged(indices: list[int], lengths: list[int], weights: list[float] | None = None) -> Jagged:
    counted = None if weights is None else torch.tensor(weights)
    return Jagged(torch.tensor(indices, dtype=torch.int64), torch.tensor(lengths), counted)


class Bags(nn.Module):
    """Embedding bags of sparse features, in another order than the input's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        bags = {k: nn.EmbeddingBag(rows, 3, mode="sum") for k, rows in TABLES.items()}
        self.bags = nn.ModuleDict(bags).double()

    def forward(self, dense: torch.Tensor, features: Any) -> torch.Tensor:
        found = []
        for name in sorted(TABLES):
            part = features[name]
            weights = None if part.weights is None else part.weights.double()
            found.append(self.bags[name](part.indices, part.offsets, weights))
        return torch.cat([dense, *found], 1)


SAMPLES = [
    {"user": [1, 2], "item": [8], "shop": [0, 4, 4]},
    {"user": [6], "item": []},
    {"shop": torch.tensor([3])},
]


def batch(samples: list[Any]) -> tuple[torch.Tensor, CombinedFeatures]:
    features = SparseCollate(TABLES)(samples)["features"]
    return torch.ones(len(samples), 2, dtype=torch.float64), features


def test_collate_in_a_loader() -> None:
    rows = [{**s, "label": float(i)} for i, s in enumerate(SAMPLES)]
    loader: Any = DataLoader(rows, batch_size=3, collate_fn=SparseCollate(TABLES))  # type: ignore[arg-type]
    (made,) = loader
    features = made["features"]
    assert made["label"].tolist() == [0.0, 1.0, 2.0]
    assert features.names == ("user", "item", "shop")
    assert features.indices.tolist() == [1, 2, 6, 8, 0, 4, 4, 3]
    assert features.lengths.tolist() == [[2, 1, 0], [1, 0, 0], [3, 0, 1]]
    assert features.splits.tolist() == [3, 1, 4]
    part = features["shop"]
    assert part.indices.tolist() == [0, 4, 4, 3]
    assert part.offsets.tolist() == [0, 3, 3]
    assert part.indices.untyped_storage().data_ptr() == features.indices.data_ptr()


def test_weights_are_collated() -> None:
    collate = SparseCollate({"a": 4, "b": None}, weighted=True)
    features = collate([{"a": ([1, 2], [0.5, 2.0])}, {"b": ([9], [3.0])}])["features"]
    assert features["a"].weights.tolist() == [0.5, 2.0]
    assert features["b"].weights.tolist() == [3.0]
    with pytest.raises(ValueError, match="feature 'a', row 1: 1 indices have 2 weights"):
        collate([{}, {"a": ([1], [1.0, 2.0])}])


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (jagged([1, 2], [1, 2]), "feature 'f', row 1: the lengths add up to 3, and there are 2"),
        (jagged([1, 2, 3], [1, 1]), "feature 'f', row 1: the lengths add up to 2, and there are 3"),
        (jagged([1, 2], [3, -1]), "feature 'f', row 1: the length is -1"),
        (jagged([1, 2, 5], [1, 0, 2]), "feature 'f', row 2: index 5 is not in its table of 5 rows"),
        (jagged([-1], [0, 1]), "feature 'f', row 1: index -1 is not in its table of 5"),
        (Jagged(torch.ones(2), torch.tensor([2])), "feature 'f': indices and lengths must be int"),
        (jagged([1], [1], [1.0, 2.0]), "feature 'f': 1 indices have 2 weights"),
    ],
)
def test_what_is_wrong_is_named(feature: Jagged, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine({"f": feature}, {"f": 5})


def test_features_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="no features"):
        combine({})
    with pytest.raises(ValueError, match=r"different numbers of rows: \[1, 2\]"):
        combine({"a": jagged([1], [1]), "b": jagged([1], [1, 0])})
    with pytest.raises(ValueError, match="some of the features have weights"):
        combine({"a": jagged([1], [1]), "b": jagged([1], [1], [2.0])})


_ROWS = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.lists(_ROWS, min_size=1, max_size=4))
def test_any_features_come_back(drawn: list[list[list[int]]]) -> None:
    count = min(map(len, drawn))
    features = {
        str(i): jagged([x for row in rows[:count] for x in row], [len(r) for r in rows[:count]])
        for i, rows in enumerate(drawn)
    }
    combined = combine(features, dict.fromkeys(features, 5))
    for name, part in combined.separate().items():
        assert torch.equal(part.indices, features[name].indices)
        assert torch.equal(part.lengths, features[name].lengths)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """Return bags whose graph takes combined features."""
    return tvmbridge.optimize_fx(Bags(), batch(SAMPLES), measure=False)


def own(module: nn.Module) -> Bags:
    bags = Bags()
    bags.load_state_dict(module.state_dict())
    return bags


FEW = [
    [{"user": [1]}, {}, {}, {}],
    [{}, {}],
    [{"shop": [0], "item": [1], "user": [2]}, {"shop": [0, 1], "item": [1], "user": [6, 6, 6]}],
    [{"shop": [4, 0]}, {"item": [8, 8]}, {"user": [3, 1]}, {}, {}],
]


@pytest.mark.parametrize("samples", FEW, ids=range(len(FEW)))
def test_the_graph_takes_any_batch(module: nn.Module, samples: list[Any]) -> None:
    calls = tvmbridge.fx_report(module).calls
    given = batch(samples)
    plain = own(module)
    for apart in (given[1], given[1].separate()):
        expected = plain(given[0], apart)
        torch.testing.assert_close(module(*given), expected, rtol=0, atol=1e-14)
        made = torch.autograd.grad(module(*given).square().sum(), list(module.parameters()))
        wanted = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
        for a, b in zip(made, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    report = tvmbridge.fx_report(module)
    assert (report.calls - calls, report.fallbacks) == (4, {})


def test_what_the_graph_was_not_made_for(module: nn.Module) -> None:
    dense, features = batch(SAMPLES)
    expected = own(module)(dense, features)
    torch.testing.assert_close(module(dense, features.separate()), expected)
    reordered = SparseCollate({"shop": 5, "user": 7, "item": 9})(SAMPLES)["features"]
    torch.testing.assert_close(module(dense, reordered), expected)
    with torch.autocast("cpu"):
        torch.testing.assert_close(module(dense, features), expected)


def test_one_operator_splits_views() -> None:
    entry = Rewriting((CombineSparseInputs(),), measure=False)(
        Bags(), None, batch(SAMPLES), {}, False
    )
    graph = entry.graph_module.graph
    assert len(graph.find_nodes(op="call_function", target=split_features)) == 1
    names = [n.name for n in graph.find_nodes(op="placeholder")]
    assert names[-3:] == ["combined_indices", "combined_lengths", "combined_splits"]
    assert entry.records[0].rewrites == 3
    part = split_features(torch.arange(5), torch.tensor([2, 0, 3]), [2, 0, 1])
    assert [p.tolist() for p in part] == [[2, 3, 4], [0, 1], []]


class Two(nn.Module):
    def forward(self, a: Any, b: Any, c: Any, d: Any) -> torch.Tensor:
        return a.sum() * b + c.sum() * d


def test_alone_on_a_graph_module() -> None:
    a, b, c, d = (torch.arange(n).double() for n in (3, 2, 4, 2))
    graph_module: Any = torch.export.export(Two(), (a, b, c, d)).module(check_guards=False)
    features = (Feature("x", "a", "b"), Feature("y", "c", "d"))
    report = PassReport()
    after: Any = CombineSparseInputs(features, ("y", "x")).apply(graph_module, report).graph_module
    indices, lengths = torch.cat([c, a]), torch.stack([d, b])
    expected = Two()(a, b, c, d)
    assert torch.equal(after(indices, lengths, torch.tensor([4, 3])), expected)
    assert torch.equal(graph_module(a, b, c, d), expected)
    declined = PassReport()
    lacking = CombineSparseInputs((Feature("x", "a", "b"), Feature("y", "c", "q")))
    assert not lacking.apply(graph_module, declined).modified
    assert declined.declined == ["the inputs: feature 'y': the graph has no input q"]


def test_keyed_jagged_tensors() -> None:
    try:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    except (ImportError, OSError) as error:
        pytest.skip(f"torchrec cannot be imported: {error}")
    _, features = batch(SAMPLES)
    keyed = features.to_keyed_jagged_tensor()
    assert isinstance(keyed, KeyedJaggedTensor)
    assert keyed["shop"].values().tolist() == features["shop"].indices.tolist()
    again = CombinedFeatures.of_keyed_jagged_tensor(keyed)
    assert again.names == features.names
    for name in ("indices", "lengths", "splits"):
        assert torch.equal(getattr(again, name), getattr(features, name))


def test_separate_features_move() -> None:
    moved = SparseFeatures({"a": jagged([1], [1])}).to("cpu")
    assert moved["a"].indices.tolist() == [1]

"""The DLRM of examples/dlrm: the passes keep its results, and it learns."""

from __future__ import annotations

import copy

import pytest
import torch

import tvmbridge
from examples.dlrm.clicks import Clicks
from examples.dlrm.model import Sizes
from examples.dlrm.train import Place, Step, make
from tvmbridge.passes.fx.base import FxPass
from tvmbridge.passes.fx.combine_sparse_inputs import CombineSparseInputs
from tvmbridge.passes.fx.costs import Costs
from tvmbridge.passes.fx.feature_fusion import FeatureFusion
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion

SIZES = Sizes(features=10, rows=50, width=8, hidden=16)
ALONE = Place(0, 1, torch.device("cpu"))
FREE = Costs(launch=1.0, bytes_per_second=1e18)
FUSED = (CombineSparseInputs(), FeatureFusion(costs=FREE), HorizontalFusion(costs=FREE))


@pytest.mark.parametrize("passes", [pytest.param(None, marks=pytest.mark.slow), FUSED])
def test_steps_are_those_of_the_module_itself(passes: tuple[FxPass, ...] | None) -> None:
    model = make(SIZES, ALONE).double()
    reference = copy.deepcopy(model)
    clicks = Clicks(SIZES, 8)
    batches = [clicks[i] for i in range(4)]
    dense = [b.dense.double() for b in batches]
    tvmbridge.optimize_fx(model, (dense[0], batches[0].features), passes, measure=False)
    steps = Step(model, ALONE), Step(reference, ALONE)
    for x, batch in zip(dense, batches, strict=True):
        batch = type(batch)(x, batch.labels.double(), batch.features)
        ours, theirs = (step(batch) for step in steps)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    report = tvmbridge.fx_report(model)
    assert (report.calls, report.fallbacks) == (4, {})
    (records,) = report.records.values()
    lookups = passes is not None  # the default costs of a CPU fuse no lookups
    assert [r.rewrites > 0 for r in records] == [True, lookups, True]


def test_every_rank_draws_the_same_rows() -> None:
    whole = Clicks(SIZES, 8)[3]
    halves = [Clicks(SIZES, 4, rank, 2)[3] for rank in range(2)]
    assert torch.equal(torch.cat([h.dense for h in halves]), whole.dense)
    assert torch.equal(torch.cat([h.labels for h in halves]), whole.labels)
    for half in halves:
        for name in half.features:
            assert torch.equal(half.features[name].indices, whole.features[name].indices)


@pytest.mark.slow
def test_the_loss_falls() -> None:
    step, clicks = Step(make(SIZES, ALONE), ALONE), Clicks(SIZES, 256)
    losses = [float(step(clicks[i])) for i in range(120)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])

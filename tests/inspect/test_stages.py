"""The stages that can be drawn, and the times of their operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tvm import relax

from tests.models import TransformerLayer
from tvmbridge import capture, to_relax
from tvmbridge.core.errors import BridgeError
from tvmbridge.inspect.stages import STAGES, Stages
from tvmbridge.inspect.timing import seconds_alone
from tvmbridge.inspect.visualize import picture_of


@pytest.fixture(scope="module")
def trained() -> Stages:
    return Stages(TransformerLayer().train(), torch.randn(2, 5, 8))


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_of_training_is_drawn_in_frames(trained: Stages, name: str) -> None:
    drawn = trained.draw(name)
    picture = picture_of(drawn.graph, coloring=drawn.coloring, gradients=drawn.gradients)
    assert {"first", "up", "out"} <= {group.path for group in picture.groups.values()}
    gradients = {n.facts["operator"] for n in picture.nodes if n.kind == "gradient"}
    named = {f"gradient of {n}" for n, _ in TransformerLayer().named_parameters()}
    assert gradients == (named if name in ("joint", "backward") else set())
    legend = [text for text, _ in picture.legend]
    assert ("kept for backward" in legend) is (name == "joint")


def test_stages_in_evaluation() -> None:
    module = TransformerLayer().eval()
    stages = Stages(module, torch.randn(2, 5, 8))
    assert stages.names == ("captured", "passes", "forward")
    assert isinstance(stages.draw("forward").graph, relax.Function)
    with pytest.raises(BridgeError, match="in train mode"):
        stages.draw("backward")


def test_the_module_is_left_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    stages = Stages(module, torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    for name in stages.names:
        stages.draw(name)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_each_call_is_measured() -> None:
    mod = to_relax(capture(TransformerLayer().train(), torch.ones(2, 5, 8)))
    found = seconds_alone(mod)
    bindings = mod["main"].body.blocks[0].bindings
    assert set(found) == {b.var for b in bindings if isinstance(b.value, relax.Call)}
    assert all(0 < seconds < 10 for seconds in found.values())
    drawn = picture_of(mod, seconds=found)
    assert sum("seconds" in node.facts for node in drawn.nodes) == len(found)


def test_what_cannot_be_evaluated_is_an_error() -> None:
    x = relax.Var("x", relax.TensorType(ndim=1, dtype="float32"))
    with pytest.raises(BridgeError, match="cannot be measured"):
        seconds_alone(relax.Function([x], relax.op.abs(x), x.ty, is_pure=True))

"""The captured graph, the positions where it may be cut, and the resulting stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import Images, Language, cross_entropy, tokens
from tests.distributed.scripts import images
from tvmbridge.core.errors import CaptureError, PipelineError
from tvmbridge.core.torch_private import pytree
from tvmbridge.distributed.boundaries import boundaries, cuts_by_hand, problem_at
from tvmbridge.distributed.compiling import _turns
from tvmbridge.distributed.graph import PipelineGraph, capture_graph, submodule_of
from tvmbridge.distributed.plan import plan_pipeline
from tvmbridge.distributed.splitting import StageModule, cut
from tvmbridge.distributed.stage import with_constants


def run(graph: PipelineGraph, stages: Sequence[StageModule], leaves: Sequence[Any]) -> Any:
    """Run all stages one after the other, as the ranks would."""
    values: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        made = stage.module(*values, *(leaves[i] for i in stage.used_inputs))
        values = tuple(
            made[s.value] if s.kind == "made" else values[s.value]
            for s in stage.outputs
            if s.kind != "constant"
        )
    leaves = with_constants(stages[-1].outputs, values)
    return pytree.tree_unflatten(leaves, graph.output_spec)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_stages_together_are_the_module(tied: bool) -> None:
    """Compare outputs and gradients of all parameters bit by bit."""
    module = Language(tied=tied).double().train()
    inputs, targets = tokens()
    graph = capture_graph(module, (inputs,), {})
    positions = [0, *boundaries(graph, 3)]
    # The embedding, four blocks, and the head: within a block two values cross a cut.
    assert len(positions) == 6
    for chosen in (positions, [0, positions[2], positions[5]]):
        module.zero_grad()
        cross_entropy(run(graph, cut(graph, chosen), [inputs]), targets).backward()
        found = {n: p.grad for n, p in module.named_parameters()}
        module.zero_grad()
        cross_entropy(module(inputs), targets).backward()
        for name, parameter in module.named_parameters():
            assert torch.equal(found[name], parameter.grad), name


class Skips(nn.Module):
    """A module with nested outputs: of the first and last layers, an input, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        first = self.layers[0](x)
        last = self.layers[2](torch.relu(self.layers[1](first)) + first)
        return {"first": first, "both": (last, scale * 2), "number": 3}


def test_outputs_of_any_stage_and_structure() -> None:
    module, x, scale = Skips().double(), torch.randn(2, 4).double(), torch.ones(2).double()
    graph = capture_graph(module, (x, scale), {})
    stages = cut(graph, [0, *cuts_by_hand(graph, ["layers.1", "layers.2"])])
    found, expected = run(graph, stages, [x, scale]), module(x, scale)
    assert torch.equal(found["first"], expected["first"])
    assert torch.equal(found["both"][0], expected["both"][0])
    assert torch.equal(found["both"][1], expected["both"][1])
    assert found["number"] == 3
    # The first layer's result crosses both cuts; the input is given to the stage that needs it.
    assert [len(s.received) for s in stages] == [0, 1, 2]
    assert [s.used_inputs for s in stages] == [(0,), (), (1,)]


def test_no_cut_parts_what_is_written_in_place() -> None:
    """Check in-place ReLUs, which write into batch norm's result, and running statistics.

    A cut must separate neither of them from its layer.
    """
    module, (inputs, _) = Images().double().train(), images()
    graph = capture_graph(module, (inputs,), {})
    for position in boundaries(graph, 3):
        assert "relu_" not in str(graph.nodes[position].target)
    relu = next(i for i, n in enumerate(graph.nodes) if "relu_" in str(n.target))
    assert "writes into what" in (problem_at(graph, relu) or "")
    before = {n: b.clone() for n, b in module.named_buffers()}
    found = run(graph, cut(graph, [0, *boundaries(graph, 3)]), [inputs])
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    module.load_state_dict(before, strict=False)
    assert torch.equal(found, module(inputs))
    for name, buffer in module.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_an_integer_crosses_no_cut() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(4, 4), nn.Embedding(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts(self.router(x).argmax(-1))

    graph = capture_graph(Routed(), (torch.randn(2, 4),), {})
    with pytest.raises(PipelineError, match=r"at experts: argmax is torch\.int64"):
        cuts_by_hand(graph, ["experts"])


def test_cuts_by_hand_are_checked() -> None:
    graph = capture_graph(Language(), (tokens()[0],), {})
    (position,) = cuts_by_hand(graph, ["blocks.2"])
    assert submodule_of(graph.nodes[position]) == "blocks.2.norm"
    with pytest.raises(PipelineError, match="no operator runs in submodule 'layers'; there are"):
        cuts_by_hand(graph, ["layers"])
    with pytest.raises(PipelineError, match="not the order"):
        cuts_by_hand(graph, ["blocks.2", "blocks.1"])
    with pytest.raises(PipelineError, match="begins the module"):
        cuts_by_hand(graph, ["embedding"])


def test_what_depends_on_inputs_alone_is_computed_where_it_is_read() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            mask = keep.to(x.dtype).unsqueeze(-1) * 2
            return self.second(self.first(x) * mask) * mask

    module, x, keep = Masked(), torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    graph = capture_graph(module, (x, keep), {})
    stages = cut(graph, [0, *cuts_by_hand(graph, ["second"])])
    assert [len(s.received) for s in stages] == [0, 1]
    assert [s.used_inputs for s in stages] == [(0, 1), (1,)]
    assert torch.equal(run(graph, stages, [x, keep]), module(x, keep))


def test_equal_stages_have_equal_keys() -> None:
    graph = capture_graph(Language().train(), (tokens()[0],), {})
    stages = cut(graph, [0, *cuts_by_hand(graph, ["blocks.1", "blocks.2", "blocks.3", "head"])])
    keys = [s.key for s in stages]
    assert keys[1] == keys[2] == keys[3]
    assert len(set(keys)) == 3


class Positions(nn.Module):
    """A layer that creates a tensor on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.arange(4, device=x.device)


def test_equal_stages_on_different_gpus_have_equal_keys() -> None:
    module = nn.Sequential(*(Positions() for _ in range(4)))
    graph = capture_graph(module, (torch.randn(2, 4),), {})
    positions = [0, *cuts_by_hand(graph, ["1", "2", "3"])]
    devices = [torch.device("cuda", i) for i in range(4)]
    stages = cut(graph, positions, devices)
    assert "index=2" in stages[2].module.code
    assert stages[1].key == stages[2].key
    assert stages[1].key != cut(graph, positions, [torch.device("cpu")] * 4)[1].key
    firsts = {0: 0, 1: 1, 2: 1, 3: 3}
    for device, expected in (("cpu", ([0, 1, 3], [2])), ("cuda", ([0, 1, 2, 3], []))):
        turns = _turns(stages, firsts, torch.device(device))
        assert tuple([s.index for s in turn] for turn in turns) == expected


def test_the_plan_is_told_before_anything_is_compiled() -> None:
    inputs, _ = tokens(16)
    plan = plan_pipeline(Language(tied=True).train(), inputs, microbatches=8, stages=4, ranks=2)
    assert [s.rank for s in plan.stages] == [0, 1, 0, 1]
    assert plan.tied == ("embedding.weight",) or plan.tied == ("head.weight",)
    text = str(plan)
    for word in ("begins with", "balance of the devices", "idle share", "memory a device", "tied"):
        assert word in text
    assert 0 < plan.predicted().idle < 1
    pinned = plan_pipeline(
        Language().train(), inputs, microbatches=8, stages={"blocks.3": 0, "head": 1}
    )
    assert pinned.stages[1].parameters <= 11 * 16 + 3 * 16
    assert sum(s.operators for s in pinned.stages) == sum(s.operators for s in plan.stages)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stages": 3, "ranks": 2}, "3 stages on 2 devices"),
        ({"stages": 0}, "stages is 0"),
        ({"stages": "blocks.1"}, "give a list of names"),
        ({}, "say how many stages"),
        ({"stages": 2, "schedule": "fast"}, "choose one of"),
        ({"stages": 2, "microbatches": 3}, "a batch of 8 cannot be cut into 3"),
        ({"stages": 40}, "40 stages, but the module can be cut into"),
        ({"stages": {"blocks.1": 1, "blocks.0": 1, "embedding": 1}}, "no cut into 2 stages keeps"),
        ({"stages": 2, "memory": 100}, "fits 100 bytes a device"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        plan_pipeline(
            Language().train(), tokens()[0], **{"microbatches": 4, "ranks": None, **arguments}
        )


def test_control_flow_is_refused_by_name() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="cannot be captured"):
        capture_graph(Asks(), (torch.ones(2),), {})

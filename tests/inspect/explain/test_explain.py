"""Explanations of small modules, against known facts; explaining has no side effects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.inspect.compare.models import Block, norm_network
from tests.models import bert_layer
from tvmbridge import add_tvm_dispatch, cli, dispatch_report, explain


def uses(operators: Any) -> dict[str, int]:
    return {o.name: o.count for o in operators}


def test_a_module_in_training() -> None:
    report = explain(Block(), torch.randn(5, 12))
    assert report.ok
    assert (report.module, report.mode) == ("Block", "train with gradients")
    assert (report.stage, report.reason, report.source) == ("", "", "")
    native = uses(report.native)
    assert native["aten.linear.default"] == 2
    assert native["aten.gelu.default"] == native["aten.tanh.default"] == 1
    assert not report.aten_calls
    assert not report.refused
    assert (report.joint, report.joint_reason) == ("relax", "")
    first, second = report.noise
    assert first.purpose == second.purpose == "a mask of dropout, p=0.3"
    assert "hidden = self.norm(x + self.drop(hidden))" in first.source
    assert "self.drop_again(torch.tanh(self.second(hidden)))" in second.source


def test_it_says_what_compilation_finds() -> None:
    layer, x = bert_layer("eager"), torch.randn(2, 8, 32)
    report = explain(layer, x)
    add_tvm_dispatch(layer, x)
    (compiled,) = dispatch_report(layer).specializations
    assert report.ok
    assert report.joint == compiled.joint == "relax"
    assert report.joint_reason == compiled.joint_reason
    assert report.residual_bytes == compiled.residual_bytes > 0
    assert report.residual_policy == "keep_casts"
    sizes = [r.spec.nbytes for r in report.residuals]
    assert sizes == sorted(sizes, reverse=True)
    assert uses(report.native) == compiled.native_operators
    assert uses(report.aten_calls) == compiled.aten_operators
    for operator in report.aten_calls:
        assert all("in forward: " in line for line in operator.sources)
        assert operator.sources
    assert all("self.dropout(" in draw.source for draw in report.noise[1:])
    assert "gradient by relax" in str(report)


def test_combined_products_in_inference() -> None:
    report = explain(bert_layer("eager").eval(), torch.randn(2, 8, 32))
    assert report.mode == "eval"
    assert report.joint is None
    assert report.residual_bytes == 0
    assert report.combined_products == 3
    names = [name.split(".")[-2] for name in report.packs[0]]
    assert names == ["query", "key", "value"]
    assert "one product of 3: attention.self.query.weight" in str(report)


def test_mutations() -> None:
    report = explain(norm_network(), torch.randn(6, 8))
    assert [(m.kind, m.target) for m in report.mutations] == [
        ("buffer", "1.running_mean"),
        ("buffer", "1.running_var"),
        ("buffer", "1.num_batches_tracked"),
    ]

    class Writing(nn.Module):
        def forward(self, x: torch.Tensor, found: list[torch.Tensor], scale: float) -> Any:
            x.mul_(scale)
            found.append(x + 1)
            return x * 1

    with torch.no_grad():
        report = explain(Writing().eval(), (torch.randn(3), [], 2.0))
    assert {(m.kind, m.target) for m in report.mutations} == {("input", "0"), ("argument", "1")}
    assert "2.0" in report.frozen.values()
    assert "writes its input 0" in str(report)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = 3, 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_frozen_attributes() -> None:
    report = explain(Scaled().eval(), torch.randn(3))
    assert report.frozen == {"scale": "3"}
    assert "frozen: scale = 3" in str(report)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.softmax(0).sum() > 0:
            return x
        return x * 2


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(x.half().view(-1, 2)).real + x.tanh().sum()


class Found(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)


def test_control_flow_that_depends_on_data() -> None:
    report = explain(Branching(), torch.randn(3))
    assert not report.ok
    assert report.stage == "capture"
    assert "if x.softmax(0).sum() > 0:" in report.reason
    assert "if x.softmax(0).sum() > 0:" in report.source
    assert "Branching (train): its own forward" in str(report)
    assert "refused at capture" in str(report)


def test_what_depends_on_data_runs_after_the_compiled_code() -> None:
    report = explain(Found().eval(), torch.randn(4, 6))
    assert report.ok
    assert report.eager_functions == ("nonzero",)
    assert "runs eagerly after the compiled code: nonzero" in str(report)


def test_refused_operators_have_their_lines() -> None:
    operator, line = "aten.view_as_complex.default", "torch.view_as_complex(x.half()"
    report = explain(Halves().eval(), torch.randn(4, 6))
    assert not report.ok
    (refused,) = report.refused
    assert (refused.name, refused.count) == (operator, 1)
    assert line in refused.sources[0]
    assert refused.reason
    assert operator in str(report)


def test_a_sample_that_forward_refuses() -> None:
    report = explain(nn.Linear(3, 3), torch.randn(2, 4))
    assert not report.ok
    assert "refuses this sample input" in report.reason


def test_a_module_that_cannot_be_copied() -> None:
    module = nn.Linear(3, 3)
    module.refuses = (n for n in ())  # type: ignore[assignment]
    report = explain(module, torch.randn(2, 3))
    assert not report.ok
    assert "the module cannot be copied" in report.reason


def test_what_is_no_module_or_option() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        explain(torch.tanh, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown compile options"):
        explain(nn.Tanh(), x, options={"joints": "aot"})
    with pytest.raises(TypeError, match="sample_kwargs must be a dict"):
        explain(nn.Tanh(), x, sample_kwargs=[x])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"CompileOptions\.joint"):
        explain(nn.Tanh(), x, options={"joint": "other"})


@pytest.mark.parametrize("dispatched", [False, True])
def test_nothing_is_changed(dispatched: bool) -> None:
    network, x = norm_network(), torch.randn(6, 8, requires_grad=True)
    if dispatched:
        add_tvm_dispatch(network, x)
    forward = network.__dict__.get("forward")
    kept, value = copy.deepcopy(network.state_dict()), x.detach().clone()
    places = [p.data_ptr() for p in network.parameters()]
    generator = torch.get_rng_state()
    assert explain(network, x).ok
    assert torch.equal(torch.get_rng_state(), generator)
    assert network.__dict__.get("forward") is forward
    assert [p.data_ptr() for p in network.parameters()] == places
    assert torch.equal(x, value)
    assert x.grad is None
    assert all(torch.equal(v, kept[name]) for name, v in network.state_dict().items())


def branching_and_input() -> tuple[nn.Module, torch.Tensor]:
    return Branching(), torch.randn(3)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "tests.inspect.compare.models:block_and_input"]) == 0
    assert "Block (train with gradients): whole, one graph" in capsys.readouterr().out
    assert cli.main(["explain", f"{__name__}:branching_and_input"]) == 1
    assert "refused at capture" in capsys.readouterr().out

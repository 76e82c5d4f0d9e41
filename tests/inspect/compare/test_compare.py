"""Comparison of correct modules, its lack of side effects, and its refusals."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from tests.inspect.compare.models import Block, norm_network
from tests.thinned import thinned
from tvmbridge import ComparisonReport, NumericsError, add_tvm_dispatch, compare


def right(module: nn.Module, x: torch.Tensor, **arguments: Any) -> ComparisonReport:
    """Compare a correctly compiled module, assert that no mistake is found; return the report."""
    report = compare(module, x, **arguments)
    assert report.ok, str(report)
    assert report.first is None
    report.raise_for_mistakes()
    assert report.stages[-1] == "compiled"
    for figure in report.figures:
        assert figure.verdict in ("agrees", "rounding")
    return report


@pytest.mark.parametrize("joint", thinned(["relax", "aot"], 2))
def test_a_module_in_float64(joint: str) -> None:
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    report = right(Block().double(), x, options={"joint": joint})
    assert report.dtype == "float64"
    assert "eager" not in report.stages
    for figure in report.figures:
        assert figure.error == figure.error_float64 < 1e-14


def test_all_the_stages_of_training() -> None:
    report = right(Block(), torch.randn(5, 12))
    for stage in ("eager", "captured", "imported", "LowerDropout", "Gradient", "split"):
        assert stage in report.stages
    # Stages before Gradient have outputs only.
    with pytest.raises(KeyError, match=r"no figure of 'gradient of norm.weight' at 'imported'"):
        report.figure("gradient of norm.weight", "imported")
    assert report.figure("gradient of norm.weight", "Gradient").error < 1e-6


def test_inference() -> None:
    report = right(Block().eval(), torch.randn(5, 12), backward=False)
    assert report.values == ("output",)
    assert report.departures[-1].verdict == "rounding"


@pytest.mark.parametrize("training", thinned([False, True], 2))
def test_batch_norm(training: bool) -> None:
    network = norm_network().train(training)
    report = right(network, torch.randn(6, 8), stages=("captured", "imported", "compiled"))
    written = {v for v in report.values if v.endswith("after the call")}
    statistics = {f"1.{n} after the call" for n in ("running_mean", "running_var")}
    expected = statistics | {"1.num_batches_tracked after the call"} if training else set()
    assert written == expected


@pytest.mark.slow
def test_half_precision() -> None:
    network = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
    x = torch.randn(6, 16, dtype=torch.bfloat16)
    report = right(network, x, stages=("compiled",))
    assert report.dtype == "bfloat16"
    figure = report.figure("output", "compiled")
    assert figure.bound > 1e-2
    assert figure.error_float64 is not None
    assert figure.error_float64 < 1e-14


class Noisy(nn.Module):
    """A module with both kinds of random draws: floats, which differ by dtype, and a mask."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        noised = x + torch.randn_like(x)
        return {"noised": noised, "dropped": nn.functional.dropout(noised, 0.4)}


def test_draws_are_the_same_in_both_dtypes() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    report = right(Noisy(), x, stages=("captured", "imported", "compiled"))
    assert set(report.values) == {
        "output['noised']",
        "output['dropped']",
        "gradient of input 0",
    }
    assert report.figure("output['noised']", "eager").error < 1e-6


class Shared(nn.Module):
    """A module that returns its input, its buffer, a result, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        y = x * 2
        return x.t(), x, y, y[1:], self.calls, y.detach()


@pytest.mark.parametrize("training", thinned([True, False], 2))
def test_outputs_that_share_memory(training: bool) -> None:
    x = torch.randn(4, 6, requires_grad=training)
    report = right(Shared().train(training), x, stages=("captured", "imported", "compiled"))
    assert set(report.values) >= {f"output[{i}]" for i in range(6)}
    assert ("gradient of input 0" in report.values) is training


def test_nothing_is_changed() -> None:
    network = norm_network()
    x = torch.randn(6, 8, requires_grad=True)
    network(x).sum().backward()
    kept = copy.deepcopy({**network.state_dict(), **{n: p.grad for n, p in grads(network)}})
    arguments, generator = (x.detach().clone(), x.grad), torch.get_rng_state()
    compare(network, x, stages=("captured", "compiled"))
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, arguments[0])
    assert x.grad is arguments[1]
    now = {**network.state_dict(), **{n: p.grad for n, p in grads(network)}}
    assert all(torch.equal(value, now[name]) for name, value in kept.items())


def grads(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name}.grad", p) for name, p in network.named_parameters()]


def test_a_dispatched_module_is_compared_by_its_own_forward() -> None:
    module, x = Block().eval(), torch.randn(5, 12)
    add_tvm_dispatch(module, x)
    report = right(module, x, backward=False, stages=("compiled",))
    assert report.figure("output", "compiled").error > 0


def test_an_input_that_is_given_back_and_one_that_is_written() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            y.mul_(2.0)
            return x, x * y, 3

    sample = (torch.randn(3), torch.randn(3))
    report = right(Mixed(), sample, backward=False)  # type: ignore[arg-type]
    assert set(report.values) == {"output[0]", "output[1]", "input 1 after the call"}


def test_stages_are_checked() -> None:
    with pytest.raises(ValueError, match=r"no stage is called relay; choose among eager, captured"):
        compare(Block(), torch.randn(5, 12), stages=["relay", "compiled"])
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        compare("Block", torch.randn(5, 12))  # type: ignore[arg-type]


def test_stages_restrict() -> None:
    report = compare(Block(), torch.randn(5, 12), backward=False, stages=["imported"])
    assert report.stages == ("eager", "imported")


def test_a_module_that_cannot_be_captured() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if x.sum().item() > 0 else x.cos()

    report = compare(Branching(), torch.randn(3))
    assert not report.ok
    assert report.first is None
    assert "branches by a value that depends on data" in report.reason
    assert "cannot compare" in str(report)
    with pytest.raises(NumericsError, match="nothing could be compared"):
        report.raise_for_mistakes()


def test_a_forward_that_refuses_the_sample() -> None:
    report = compare(Block(), torch.randn(5, 13))
    assert not report.ok
    assert "forward refuses the sample" in report.reason


def test_a_pass_that_fails_is_named() -> None:
    def broken(mod: Any) -> Any:
        raise ValueError("no such operator")

    report = compare(Block(), torch.randn(5, 12), backward=False, passes=[broken])
    assert "pass broken failed: no such operator" in report.reason


def test_the_report_as_json() -> None:
    report = compare(nn.Tanh(), torch.randn(3), stages=["captured"])
    data = json.loads(report.to_json())
    assert data["ok"] is True
    assert data["stages"] == list(report.stages)
    assert {f["stage"] for f in data["figures"]} == set(report.stages)

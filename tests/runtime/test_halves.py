"""Backward in halves: autograd may ask for gradients of inputs and of weights in any order."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.dispatch import _code_of
from tvmbridge.runtime.autograd import TrainingCall
from tvmbridge.runtime.halves import weights_follow_inputs

Tensors = list[torch.Tensor]


class Two(nn.Module):
    """Two layers with two outputs, the second of one layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden), hidden.sin()


class Dispatched:
    """A module, its dispatched copy, and the code that serves the copy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.eager = Two().double()
        self.ours = copy.deepcopy(self.eager)
        x = torch.zeros(5, 4, dtype=torch.float64, requires_grad=True)
        add_tvm_dispatch(self.ours, (x,), options=CompileOptions(only_if_faster=False))
        (specialization,) = _code_of(self.ours).policy.specializations()
        ((_, entry),) = specialization.compiled()
        assert entry.training is not None
        self.call: TrainingCall = entry.training

    @property
    def runs(self) -> Counter[str]:
        return Counter(self.call.half_runs)


@pytest.fixture(scope="module")
def made() -> Dispatched:
    return Dispatched()


class Case:
    """One call of forward, cotangents of its outputs, and the tensors that gradients are of.

    Args:
        module: the module.
        count: the number of outputs that backward starts from.
    """

    def __init__(self, module: nn.Module, count: int = 2) -> None:
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        self.x = x.requires_grad_()
        self.source = self.x * 1  # no leaf, so that it may be written in place
        self.outputs = module(self.source)[:count]
        self.cotangents = [torch.sin(o.detach() + 1) for o in self.outputs]
        self.weights = list(module.parameters())

    def grad(self, wanted: Tensors, keep: bool = False) -> Tensors:
        return [*torch.autograd.grad(self.outputs, wanted, self.cotangents, retain_graph=keep)]

    def of_inputs(self, keep: bool = True) -> Tensors:
        return self.grad([self.x], keep)

    def of_weights(self, keep: bool = False) -> Tensors:
        return self.grad(self.weights, keep)

    def backward(self) -> Tensors:
        for tensor in (self.x, *self.weights):
            tensor.grad = None
        torch.autograd.backward(self.outputs, self.cotangents)
        return [tensor.grad for tensor in (self.x, *self.weights) if tensor.grad is not None]


def written(case: Case) -> Tensors:
    before = case.of_inputs()
    case.cotangents[0].mul_(2)
    return [*before, *case.of_weights()]


def with_other_memory(case: Case) -> Tensors:
    before = case.of_inputs()
    case.cotangents[0].data = case.cotangents[0] * 2
    return [*before, *case.of_weights()]


def with_other_strides(case: Case) -> Tensors:
    before = case.of_inputs()
    case.cotangents[0] = case.cotangents[0].as_strided((5, 3), (1, 5))
    return [*before, *case.of_weights()]


def with_another_cotangent(case: Case) -> Tensors:
    before = case.of_inputs()
    case.cotangents[0] = case.cotangents[0] + 1
    return [*before, *case.of_weights()]


def accumulated(case: Case) -> Tensors:
    """Write into what was returned, and ask again."""
    found = case.of_inputs()
    for gradient in (first := case.of_weights(keep=True)):
        gradient.add_(1)
    return [*found, *first, *case.of_weights()]


def in_halves(case: Case) -> Tensors:
    return [*case.of_inputs(), *case.of_weights()]


PATTERNS: dict[str, Callable[[Case], Tensors]] = {
    "inputs alone": lambda c: c.of_inputs(keep=False),
    "inputs, weights": in_halves,
    "inputs twice, weights": lambda c: [*c.of_inputs(), *c.of_inputs(), *c.of_weights()],
    "inputs, weights twice": lambda c: [*c.of_inputs(), *c.of_weights(True), *c.of_weights()],
    "inputs, all": lambda c: [*c.of_inputs(), *c.backward()],
    "inputs, weights, all": lambda c: [*c.of_inputs(), *c.of_weights(True), *c.backward()],
    "weights, inputs": lambda c: [*c.of_weights(True), *c.of_inputs(False)],
    "inputs and one weight": lambda c: c.grad([c.x, c.weights[1]]),
    "one weight after inputs": lambda c: [*c.of_inputs(), *c.grad(c.weights[1:2])],
    "written": written,
    "another cotangent": with_another_cotangent,
    "accumulated": accumulated,
    "another view of a cotangent": with_other_strides,
    "another memory of a cotangent": with_other_memory,
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_in_any_order_are_those_of_eager(
    made: Dispatched, name: str, outputs: int
) -> None:
    """Check the first rounds, in which one backward computes all, and rounds with halves."""
    pattern = PATTERNS[name]
    for _ in range(2):
        found, expected = pattern(Case(made.ours, outputs)), pattern(Case(made.eager, outputs))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_each_half_runs_once_and_only_when_asked(made: Dispatched) -> None:
    for _ in range(3):
        in_halves(Case(made.ours))
    before = made.runs
    in_halves(Case(made.ours))
    assert made.runs - before == Counter(inputs=1, weights=1)
    before = made.runs
    Case(made.ours).of_inputs(keep=False)
    assert made.runs - before == Counter(inputs=1)
    before = made.runs
    Case(made.ours).backward()
    assert made.runs == before


def test_without_halves_one_backward_computes_all_once(
    made: Dispatched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check code that has no halves, such as symbolic code."""
    monkeypatch.setattr(made.call.halves, "_compiled", None)
    for name in ("inputs, weights", "accumulated", "inputs, all"):
        before = made.runs
        found, expected = PATTERNS[name](Case(made.ours)), PATTERNS[name](Case(made.eager))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert made.runs - before == Counter(whole=1)


@pytest.mark.parametrize("written", ["input", "weight"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_write_between_the_halves_raises_as_in_eager(
    made: Dispatched, monkeypatch: pytest.MonkeyPatch, compiled: bool, written: str
) -> None:
    """Check halves, and one backward that has computed all gradients before the write."""
    assert made.call.halves is not None
    if compiled:
        assert made.call.halves.compile()
    else:
        monkeypatch.setattr(made.call.halves, "_compiled", None)
    for module in (made.eager, made.ours):
        case = Case(module)
        case.of_inputs()
        with torch.no_grad():
            (case.source if written == "input" else module.second.weight).add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            case.of_weights()


def checkpointed_around_write(module: nn.Module, name: str) -> Tensors:
    """Write a parameter between the halves of a checkpoint, and restore it at the end."""
    parameter = module.get_parameter(name)
    before = parameter.detach().clone()
    case = Case(module)
    case.outputs = checkpoint(module, case.source, use_reentrant=False)
    gradients = case.of_inputs()
    try:
        with torch.no_grad():
            parameter.mul_(1.5)
        return [*gradients, *case.of_weights()]
    finally:
        with torch.no_grad():
            parameter.copy_(before)


def test_a_checkpoint_between_the_halves_reads_what_was_written(made: Dispatched) -> None:
    found = [checkpointed_around_write(m, "first.bias") for m in (made.ours, made.eager)]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_between_the_halves_refuses_written_weights(made: Dispatched) -> None:
    """The memory of a weight is what hooks return: compiled code cannot tell old from new."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpointed_around_write(made.ours, "second.weight")


class ReadsOutputs(nn.Module):
    """The gradient of the weight reads an output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(x)
        return hidden, hidden * self.scale


def test_a_graph_that_waits_for_its_second_half_is_freed() -> None:
    module = ReadsOutputs().double()
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(module, (x,), options=CompileOptions(only_if_faster=False))
    (specialization,) = _code_of(module).policy.specializations()
    halves = specialization.compiled()[0][1].training.halves  # type: ignore[union-attr]
    assert halves is not None
    for cotangent in ("own", "output", "function of the output"):
        halves._both_came = False  # the first round computes all gradients, later ones run halves
        for _ in range(2):
            outputs = module(x * 1)
            node: Any = outputs[0].grad_fn
            step = weakref.ref(node.step)
            own = [torch.ones_like(o) for o in outputs]
            given = {"own": own, "output": outputs}.get(cotangent, [o * 2 for o in outputs])
            torch.autograd.grad(outputs, [x], given, retain_graph=True)
            assert node.step.waiting is not None
            del outputs, node, given
            gc.collect()
            assert step() is None


def test_a_checkpoint_between_the_halves(made: Dispatched) -> None:
    found = []
    for module in (made.ours, made.eager):
        case = Case(module)
        case.outputs = checkpoint(module, case.source, use_reentrant=False)
        found.append(in_halves(case))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_hooks_run_once_for_each_gradient(made: Dispatched) -> None:
    counts = []
    for module in (made.ours, made.eager):
        seen: Counter[str] = Counter()
        case = Case(module)
        handles = [w.register_hook(lambda g, s=seen: s.update(["w"])) for w in case.weights]
        handles.append(case.source.register_hook(lambda g, s=seen: s.update(["x"])))
        in_halves(case)
        for handle in handles:
            handle.remove()
        counts.append(seen)
    assert counts[0] == counts[1]


def test_residuals_are_freed_between_the_halves_of_a_zero_bubble_stage(made: Dispatched) -> None:
    with weights_follow_inputs():
        case = Case(made.ours)
    node: Any = case.outputs[0].grad_fn
    step = node.step
    found = case.of_inputs()
    assert step.residuals is None
    assert len(step.waiting.values) < len(step.call.parts.residuals) + len(step.call.reads) + 2
    with pytest.raises(RuntimeError, match="ZeroBubbleStage"):
        case.grad([case.x, *case.weights], keep=True)
    with pytest.raises(RuntimeError, match="ZeroBubbleStage"):
        case.of_inputs()
    found += case.of_weights()
    assert step.waiting is None
    torch.testing.assert_close(found, in_halves(Case(made.eager)), rtol=1e-12, atol=1e-12)


def test_a_zero_bubble_stage_takes_copies_of_cotangents_that_have_the_same_values() -> None:
    """Check what schedules of PyTorch 2.11 do: they add 0 to each cotangent between the halves."""
    made = Dispatched()
    for factor in (2, 1, 1):
        with weights_follow_inputs():
            case = Case(made.ours)
        found = case.of_inputs()
        first = case.cotangents
        case.cotangents = [c * factor for c in first]
        if factor == 2:
            with pytest.raises(RuntimeError, match="ZeroBubbleStage"):
                case.of_weights()
            continue
        found += case.of_weights()
        torch.testing.assert_close(found, in_halves(Case(made.eager)), rtol=1e-12, atol=1e-12)


def test_copies_of_cotangents_may_have_nans_as_those_of_scaled_losses() -> None:
    made = Dispatched()
    for factor in (2, 1):
        with weights_follow_inputs():
            case = Case(made.ours)
        case.cotangents[0][0, 0] = torch.nan
        case.of_inputs()
        first = case.cotangents
        case.cotangents = [c * factor for c in first]
        if factor == 2:
            with pytest.raises(RuntimeError, match="ZeroBubbleStage"):
                case.of_weights()
        else:
            assert case.of_weights()[2].isnan().any()


def test_checked_calls_compare_all_gradients(made: Dispatched) -> None:
    ours = copy.deepcopy(made.eager)
    x = torch.zeros(5, 4, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(ours, (x,), options=CompileOptions(only_if_faster=False, check="always"))
    found, expected = in_halves(Case(ours)), in_halves(Case(made.eager))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (report,) = dispatch_report(ours).specializations
    assert report.checked_gradients == 2
    assert report.backward_halves == {}

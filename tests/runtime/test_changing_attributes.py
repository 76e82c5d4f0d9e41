"""Numbers in attributes that change between calls are inputs of compiled code."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report


class Annealed(nn.Module):
    """Divides by a temperature that the user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.temperature = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) / self.temperature)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Annealed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


class Counting(nn.Module):
    """Corrects a mean by the number of calls, as Adam does."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.step += 1
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y * (1 + self.step) - self.mean / (1 - 0.9**self.step)


class Warming(nn.Module):
    """Scales its results by a factor that grows for some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return torch.tanh(self.linear(x)) * min(1.0, self.step / 4)


def _pair(module: nn.Module, **options: Any) -> tuple[Any, Any]:
    served = add_tvm_dispatch(copy.deepcopy(module), on_fallback="silent", **options)
    return module, served


def _called(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    state = [t.detach().clone() for t in (y, x.grad, *module.buffers())]
    return [*state, *(p.grad.clone() for p in module.parameters())]


def _agree(eager: Any, served: Any, rows: int = 3) -> None:
    x = torch.randn(rows, 4)
    torch.testing.assert_close(_called(served, x), _called(eager, x), equal_nan=True)


def test_one_code_serves_all_temperatures_and_the_fast_path_sees_each_change() -> None:
    eager, served = _pair(Outer())
    values = [1.5, 2.0, 0.5, 0.5, 0.5, 0.5, 3.0, 3.0, -1.0, math.nan, math.inf, -0.25]
    for value in values:
        eager.inner.temperature = served.inner.temperature = value
        _agree(eager, served)
    report = dispatch_report(served)
    assert report.tvm_calls == len(values)
    assert len(report.specializations) == 1


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "other",
    [2, *(pytest.param(v, marks=_SLOW) for v in (torch.tensor(2.0), True, 1e300, 0.0))],
)
def test_values_that_the_code_does_not_serve_are_right(other: Any) -> None:
    eager, served = _pair(Annealed())
    for value in (1.5, 2.5, other, 3.5):
        eager.temperature = served.temperature = value
        if value is other and other == 0.0:
            for module in (eager, served):  # as Python: a tensor divided by zero is no error
                assert module(torch.ones(1, 4)).abs().eq(1).all()
        else:
            _agree(eager, served)
    assert dispatch_report(served).tvm_calls >= 3


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"dynamic_shapes": "auto"}, marks=pytest.mark.slow)]
)
def test_a_counter_that_forward_reads_counts(options: dict[str, Any]) -> None:
    eager, served = _pair(Counting(), **options)
    rows = [3, 3, 5, 7, 9, 6] if options else [3] * 5
    for each in rows:
        _agree(eager, served, each)
        assert served.step == eager.step
        assert type(served.step) is int
    assert dispatch_report(served).tvm_calls == len(rows)
    copies = copy.deepcopy(eager), copy.deepcopy(served)
    for _ in range(2):
        _agree(*copies)
    assert copies[0].step == copies[1].step == len(rows) + 2
    assert served.step == len(rows)
    eager.step = served.step = 0
    _agree(eager, served)


def test_a_counter_that_forward_compares_has_code_for_each_outcome() -> None:
    eager, served = _pair(Warming())
    for _ in range(8):
        _agree(eager, served)
    eager.step = served.step = 1
    _agree(eager, served)
    report = dispatch_report(served)
    assert report.tvm_calls == 9
    assert len(report.specializations) == 2


class Using(nn.Module):
    """Uses a number by a function."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.n = 3
        self.epoch, self.done = 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.linear(x))


def _decayed(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.n = m.n * 0.5
    return y * m.n


def _toggled(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.n = 1 - m.n
    return y * 2 if m.n else y * 3


def _modulo(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.n = (m.n + 1) % 3
    return y * m.linear.bias[m.n]


def _started_again(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.n += 1
    if m.n >= 5:
        m.n, m.epoch = 0, m.epoch + 1
    m.done = m.n / 5
    return y * (1 + m.epoch) + m.done


def _chosen(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return (y, y.sin(), y.cos())[m.n % 3] * 2


def _annealed(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.n += 1
    m.done = 0.5 * (1 - math.cos(math.pi * min(m.n, 40) / 40))
    return y * m.done + math.exp(-0.3 * (m.n - 10))


# Functions that assign a number to n, and the number of codes that they need.
ASSIGNED: dict[str, tuple[Any, int]] = {
    "decayed": (_decayed, 1),
    "toggled": (_toggled, 2),
    "modulo": (_modulo, 1),
    "annealed": (_annealed, 1),
    "started again": (_started_again, 2),
    "chosen": (_chosen, 3),
}


_OTHERS = ("annealed", "modulo", "decayed", "toggled", "chosen")
_SLOW_ONES = [pytest.param(n, marks=_SLOW) for n in _OTHERS]


@pytest.mark.parametrize("name", ["started again", *_SLOW_ONES])
def test_a_number_that_forward_computes_from_itself_is_an_input(name: str) -> None:
    function, codes = ASSIGNED[name]
    eager, served = _pair(Using(function))
    for _ in range(12):
        _agree(eager, served)
        assert (served.n, served.epoch, served.done) == (eager.n, eager.epoch, eager.done)
        assert type(served.n) is type(eager.n)
    report = dispatch_report(served)
    assert report.tvm_calls == 12
    assert len(report.specializations) <= codes + (name == "decayed")


class Reporting(nn.Module):
    """Returns and keeps numbers, among them the weight of a part of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.weight, self.last, self.step = 0.0, 0.0, 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        self.step += 1
        y = self.linear(x)
        parts = y.square().mean(), y.abs().mean()
        self.last = self.weight * 2
        numbers = [parts[0].item(), parts[1].item(), y.max().item(), scale]
        return parts[0] + self.weight * parts[1], numbers, {"w": self.weight, "n": self.step}


def test_numbers_that_forward_returns_and_keeps_are_inputs() -> None:
    eager, served = _pair(Reporting())
    for i in range(8):
        eager.weight = served.weight = i / 5
        x = torch.randn(3, 4)
        loss, numbers, named = served(x)
        found, expected = (loss, numbers, named), eager(x)
        # The numbers are values of float32 tensors, whose default tolerances these are.
        torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=1e-5)
        assert (named, served.last, served.step) == ({"w": i / 5, "n": i + 1}, eager.last, i + 1)
        assert [type(n) for n in (*numbers, *named.values())] == [float] * 5 + [int]
    assert dispatch_report(served).tvm_calls >= 7


REFUSED: dict[str, tuple[Any, str]] = {
    "size": (lambda m, y: y.repeat(1, m.n), "passes it to repeat"),
    "math": (lambda m, y: y * math.gamma(m.n), "converts it to a float"),
}


@pytest.mark.parametrize("name", ["size", pytest.param("math", marks=_SLOW)])
def test_a_number_that_is_no_input_is_named_with_the_line(name: str) -> None:
    function, why = REFUSED[name]
    eager, served = _pair(Using(function))
    for value in (3, 5, 2, 7, 4):
        eager.n = served.n = value
        _agree(eager, served)
        assert eager.n == served.n
    report = dispatch_report(served)
    assert why in f"{report.fallbacks} {report.examples}"


@pytest.mark.slow
def test_a_second_derivative_sees_the_number_of_its_forward() -> None:
    eager, served = _pair(Annealed())
    for module in (eager, served):
        torch.manual_seed(0)
        for value in (1.0, 2.0, 4.0):
            module.temperature = value
            x = torch.randn(3, 4, requires_grad=True)
            (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
            module.zero_grad()
            slope.square().sum().backward()
            module.seen = [p.grad.clone() for p in module.parameters()]
    torch.testing.assert_close(served.seen, eager.seen)


def test_a_number_that_changes_before_backward_is_not_read_by_it() -> None:
    eager, served = _pair(Annealed())
    for value in (1.0, 2.0, 3.0):
        x = torch.randn(3, 4)
        grads = []
        for module in (eager, served):
            module.temperature = value
            module.zero_grad()
            loss = module(x).square().sum()
            module.temperature = 100.0
            loss.backward()
            grads.append([p.grad.clone() for p in module.parameters()])
        torch.testing.assert_close(grads[1], grads[0])


class Remembering(nn.Module):
    """Keeps its hidden state, through which gradients flow to earlier calls."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.cell = nn.RNNCell(4, 3)
        self.detached = detached
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hidden is None:
            self.hidden = x.new_zeros(x.shape[0], 3)
        self.hidden = self.cell(x, self.hidden.detach() if self.detached else self.hidden)
        return self.hidden * 2


@pytest.mark.parametrize("detached", thinned([True, False], 2))
def test_a_state_that_requires_a_gradient_is_served(detached: bool) -> None:
    eager, served = _pair(Remembering(detached))
    for _ in range(3):
        xs, grads = torch.randn(3, 2, 4), []
        for module in (eager, served):
            module.hidden = None
            module.zero_grad()
            sum(module(x).square().sum() for x in xs).backward()
            grads.append([p.grad.clone() for p in module.parameters()])
        torch.testing.assert_close(grads[1], grads[0])
    assert dispatch_report(served).tvm_calls >= 6

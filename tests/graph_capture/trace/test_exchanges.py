"""Buffers that forward replaces by other tensors, also in submodules, are as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import sample
from tests.thinned import thinned
from tvmbridge import CaptureError, UnsupportedOperatorError, add_tvm_dispatch, dispatch_report

Exchange = Callable[[nn.Module, torch.Tensor], None]


class Keeps(nn.Module):
    """Replaces buffers in forward, and reads them afterwards."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.inner = nn.Linear(24, 24, dtype=torch.float64)
        self.register_buffer("now", torch.ones(24, dtype=torch.float64))
        self.register_buffer("then", torch.full((24,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.exchange(self, y.detach())
        return y * self.now + self.then


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2  # type: ignore[no-any-return]


def _average(module: nn.Module, y: torch.Tensor) -> None:
    module.now = 0.9 * module.now + 0.1 * y.mean(0)


def _swap(module: nn.Module, y: torch.Tensor) -> None:
    module.now, module.then = module.then, module.now


def _shift(module: nn.Module, y: torch.Tensor) -> None:
    """Assign a new value to ``now`` before its old value is assigned to ``then``."""
    before = module.now
    module.now = y.mean(0)
    module.then = before


def _in_the_dict(module: nn.Module, y: torch.Tensor) -> None:
    module._buffers["now"] = y.mean(0)


def _registered(module: nn.Module, y: torch.Tensor) -> None:
    module.register_buffer("now", y[0] + 1)


def _rolled_and_written(module: nn.Module, y: torch.Tensor) -> None:
    module.now = torch.roll(module.now, 1, 0)
    module.now[0] = y.mean()


SAME_KIND: list[Exchange] = [
    _average,
    _swap,
    _shift,
    _in_the_dict,
    _registered,
    _rolled_and_written,
]


def _steps(module: nn.Module) -> list[torch.Tensor]:
    found = []
    for number in range(3):
        output = module(sample() * (number + 1))
        if module.training:
            module.zero_grad()
            output.square().sum().backward()
            found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found += [output.detach(), *(b.clone() for b in module.buffers())]
    return found


def _made(exchange: Exchange, nested: bool, training: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = Around(Keeps(exchange)) if nested else Keeps(exchange)
    return module.train(training), copy.deepcopy(module).train(training)


# By turns nested in evaluation, and alone in training.
@pytest.mark.parametrize(("number", "exchange"), thinned(enumerate(SAME_KIND), 3))
def test_exchanged_buffers_are_as_in_eager(number: int, exchange: Exchange) -> None:
    ours, theirs = _made(exchange, nested=bool(number % 2), training=not number % 2)
    add_tvm_dispatch(ours, sample())
    for got, wanted in zip(_steps(ours), _steps(theirs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    assert dispatch_report(ours).tvm_calls == 3


def _grown(module: nn.Module, y: torch.Tensor) -> None:
    if module.then.dim() == 1:
        module.then = torch.arange(48.0, dtype=torch.float64).view(2, 24)[:1].clone()
        module.register_buffer("now", torch.ones(1, 24, dtype=torch.float64) * 3)


def _converted(module: nn.Module, y: torch.Tensor) -> None:
    module.now = y.mean(0).float()


@pytest.mark.parametrize(("exchange", "nested"), [(_grown, False), (_converted, True)])
def test_a_buffer_that_the_first_call_makes_another_kind_is_served_after_it(
    exchange: Exchange, nested: bool
) -> None:
    ours, theirs = _made(exchange, nested, training=True)
    add_tvm_dispatch(ours, sample())
    for got, wanted in zip(_steps(ours), _steps(theirs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    report = dispatch_report(ours)
    assert report.tvm_calls == 2, report.fallbacks


class _KeepsItsInput(nn.Module):
    row: torch.Tensor
    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24, dtype=torch.float64)
        self.register_buffer("row", torch.zeros(24, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(24, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.row + self.bias
        self.row, self.bias = x.detach()[1], self.linear.bias.detach()
        return y


def test_a_buffer_that_is_memory_of_an_input_or_a_weight_shows_what_is_written_there() -> None:
    ours = Around(_KeepsItsInput()).train()
    theirs = copy.deepcopy(ours)
    add_tvm_dispatch(ours, sample())
    for _ in range(2):
        found = []
        for module in (ours, theirs):
            x = sample()
            found.append(module(x))
            x[1] += 1
            with torch.no_grad():
                module.inner.linear.bias.mul_(2)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert dispatch_report(ours).tvm_calls == 2


class _Twice(nn.Module):
    """A module that has one submodule in two places."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, 24, dtype=torch.float64), shared)
        self.second = nn.Sequential(nn.Linear(24, 24, dtype=torch.float64), shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "training"), thinned([("written", True), ("exchanged", False)], 2)
)
def test_buffers_of_a_submodule_in_two_places_are_written_twice(kind: str, training: bool) -> None:
    norm = nn.BatchNorm1d(24, dtype=torch.float64)
    ours = _Twice(norm if kind == "written" else Keeps(_average)).train(training)
    theirs = copy.deepcopy(ours)
    add_tvm_dispatch(ours, sample())
    for got, wanted in zip(_steps(ours), _steps(theirs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    assert dispatch_report(ours).tvm_calls == 3


class _OneTensor(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(24, dtype=torch.float64))
        if plain:
            self.total = self.count
        else:
            self.register_buffer("total", self.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * self.total


@pytest.mark.parametrize("plain", [False, True])
def test_one_tensor_in_two_places_that_is_written_is_refused_by_name(plain: bool) -> None:
    with pytest.raises(CaptureError, match=r"writes into (count|total), which is (count|total)"):
        add_tvm_dispatch(_OneTensor(plain), sample())


def _one_for_two(module: nn.Module, y: torch.Tensor) -> None:
    module.now = module.then = y.mean(0)


def test_one_tensor_for_two_buffers_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="now and then for tensors that share"):
        add_tvm_dispatch(Keeps(_one_for_two), sample())


class _MadeByTheFirstCall(nn.Module):
    mean: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.scale = nn.Parameter(torch.full((24,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return (x - self.mean) * self.scale


@pytest.mark.parametrize("training", [False, True])
def test_a_buffer_that_the_first_call_makes_is_read_by_the_others(training: bool) -> None:
    ours = Around(_MadeByTheFirstCall()).train(training)
    theirs = copy.deepcopy(ours)
    add_tvm_dispatch(ours, sample())
    for got, wanted in zip(_steps(ours), _steps(theirs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    report = dispatch_report(ours)
    assert report.fallbacks == {"a parameter or buffer is missing": 1}
    ours.inner.mean = theirs.inner.mean = None
    torch.testing.assert_close(ours(sample() + 3), theirs(sample() + 3))
    torch.testing.assert_close(ours.inner.mean, theirs.inner.mean)
    torch.testing.assert_close(ours(sample()), theirs(sample()))


class _LongerAtEachCall(nn.Module):
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 24, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, x.detach()])
        return x * self.rows.mean(0)


def test_a_buffer_that_each_call_makes_longer_is_refused_by_name() -> None:
    module = Around(_LongerAtEachCall())
    with pytest.raises(CaptureError, match=r"writes inner\.rows, which compiled code would not"):
        add_tvm_dispatch(module, sample())


def test_one_of_two_names_of_a_buffer_is_refused() -> None:
    module = Keeps(_average)
    module.then = module.now
    with pytest.raises(CaptureError, match="exchanges the buffer now, which has another name"):
        add_tvm_dispatch(module, sample())

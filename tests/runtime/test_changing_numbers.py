"""Tests of numbers that change between calls and become inputs of compiled code."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.dispatcher import Dispatcher


class Timed(nn.Module):
    """Takes a time as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, t: Any, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.linear(x) * t - scale)


class Branching(nn.Module):
    """Branches on a number."""

    def forward(self, x: torch.Tensor, t: int) -> torch.Tensor:
        return torch.tanh(x * 2) if t > 3 else torch.tanh(x * 3)


def _dispatched(model: nn.Module, **options: Any) -> tuple[nn.Module, Dispatcher]:
    served = add_tvm_dispatch(
        copy.deepcopy(model), on_fallback="silent", options={"only_if_faster": False}, **options
    )
    dispatcher = served.__dict__["forward"]
    assert isinstance(dispatcher, Dispatcher)
    return served, dispatcher


def _gradients(model: nn.Module, *given: Any) -> list[torch.Tensor]:
    model.zero_grad()
    results = model(*given)
    results.nan_to_num().sum().backward()
    return [results.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_further_values_are_served_by_one_code_in_training_and_inference() -> None:
    model = Timed()
    served, dispatcher = _dispatched(model)
    values = [1000, 980, 0, -1, 1, 1 << 30, *range(960, 860, -10)]
    for value in values:
        x = torch.randn(3, 4)
        expected, found = _gradients(model, x, value), _gradients(served, x, value)
        torch.testing.assert_close(found, expected)
    assert dispatcher.code.served() == len(values)
    assert len(dispatcher.code.kept.known) == 2
    with torch.no_grad():
        for value in (3, 5, 8):
            torch.testing.assert_close(served.eval()(x, value), model.eval()(x, value))
    assert dispatcher.code.served() == len(values) + 3


def test_other_classes_of_numbers_are_never_taken_for_the_known_one() -> None:
    model = Timed().eval()
    served, dispatcher = _dispatched(model)
    x = torch.randn(3, 4)
    values = [2.0, 3.5, math.nan, math.inf, 0.0, -0.0, 2, True, numpy.float64(2.5), 1e300, 4, 7]
    with torch.no_grad():
        for value in values:
            torch.testing.assert_close(served(x, value), model(x, value), equal_nan=True)
            torch.testing.assert_close(
                served(x, t=value, scale=2.5), model(x, value, 2.5), equal_nan=True
            )
    kinds = {k for s in dispatcher.code.kept.known for k in map(_kinds, [s]) if k}
    assert {of_t for of_t, *_ in kinds} == {int, float}


def _kinds(specialization: Any) -> tuple[type, ...]:
    return tuple(known.kind for known in specialization.signature.numbers.values())


def test_a_number_that_is_compared_has_code_for_each_outcome() -> None:
    model = Branching()
    served, dispatcher = _dispatched(model)
    x = torch.randn(8)
    for value in (1, 5, 2, 7, 3, 4, 8, 0):
        torch.testing.assert_close(served(x, value), model(x, value))
    assert dispatcher.code.served() == 8
    assert len(dispatcher.code.kept.known) == 3  # one for the first value, one for each outcome


class Counting(nn.Module):
    """Takes a number as a size."""

    def forward(self, x: torch.Tensor, t: int) -> torch.Tensor:
        return x.repeat(t)


def test_a_number_that_is_a_size_stays_a_constant_and_the_report_says_why() -> None:
    model = Counting()
    served, dispatcher = _dispatched(model)
    x = torch.randn(8)
    for value in (1, 5, 2, 7, 3, 4):
        torch.testing.assert_close(served(x, value), model(x, value))
    assert dispatcher.code.served() == 2
    assert not any(map(_kinds, dispatcher.code.kept.known))
    text = str(dispatch_report(served))
    assert "`t`" in text
    assert "forward passes it to repeat" in " ".join(dispatch_report(served).examples.values())


@pytest.mark.slow
def test_numbers_and_sizes_change_together() -> None:
    model = Timed().eval()
    served, dispatcher = _dispatched(model, dynamic_shapes="auto")
    # More sizes than get code of their own where code for any size fails.
    calls = [(3, 2), (5, 4), *((rows, rows + 1) for rows in range(6, 16)), (3, 11)]
    with torch.no_grad():
        for rows, value in calls:
            x = torch.randn(rows, 4)
            torch.testing.assert_close(served(x, value), model(x, value))
    assert dispatcher.code.served() == len(calls)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sample_with_changing_sizes_is_like_a_first_call(sampled: bool) -> None:
    model, x = Timed().eval(), torch.randn(3, 4)
    sample = {"sample_input": (x, 1), "dynamic_shapes": "auto"} if sampled else {}
    served, dispatcher = _dispatched(model, **sample)
    with torch.no_grad():
        for value in (1, 2, 3, 4):
            torch.testing.assert_close(served(x, value), model(x, value))
    assert dispatcher.code.served() == 4


class Appending(nn.Module):
    """Appends to a list beside a number."""

    def forward(self, x: torch.Tensor, t: float, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(x * t)
        return x.half() * t


def test_a_list_beside_a_number_grows_and_half_precision_is_not_rounded_first() -> None:
    served, dispatcher = _dispatched(Appending())
    x = torch.tensor([0.0, 0.5, -1e-3])
    for value in (0.1, 0.3, 1e5, 7e4):
        lists: tuple[list[torch.Tensor], ...] = ([], [])
        expected, found = Appending()(x, value, lists[0]), served(x, value, lists[1])
        assert torch.equal(found, expected)
        torch.testing.assert_close(*lists)
    assert dispatcher.code.served() == 4


class Power(nn.Module):
    """Computes a power with a number as the exponent."""

    def forward(self, x: torch.Tensor, t: float) -> torch.Tensor:
        return torch.exp(x) ** t


def test_values_that_the_code_does_not_serve_compile_no_more_such_code() -> None:
    served, dispatcher = _dispatched(Power())
    x = torch.randn(3)
    for value in (1.5, 2.5, math.inf, 1e9, 1e10, 3.5):
        torch.testing.assert_close(served(x, value), Power()(x, value))
    assert [bool(s.signature.numbers) for s in dispatcher.code.kept.known] == [False, True, False]


class Cache(nn.Module):
    """Writes each row into a cache at a position."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(2, 32, 4))

    def forward(self, x: torch.Tensor, pos: int) -> torch.Tensor:
        self.rows[:, pos] = self.linear(x)[:, 0]
        seen = torch.arange(32) <= pos
        return torch.tanh(self.rows.masked_fill(~seen[:, None], 0.0)).sum(1)


class Sliced(Cache):
    """Reads the rows up to a position."""

    def forward(self, x: torch.Tensor, pos: int) -> torch.Tensor:
        self.rows[:, pos : pos + x.shape[1]] = self.linear(x)
        rows = self.rows[:, : pos + x.shape[1]]
        return torch.tanh(rows * 2 - 1).sum(1) / (pos + 1)


@pytest.mark.parametrize("kind", [Cache, pytest.param(Sliced, marks=pytest.mark.slow)])
def test_positions_in_a_cache_are_served(kind: type[Cache]) -> None:
    eager = kind().eval()
    served, dispatcher = _dispatched(eager)
    with torch.no_grad():
        for pos in range(12):
            x = torch.randn(2, 1, 4)
            torch.testing.assert_close(served(x, pos), eager(x, pos))
            assert torch.equal(served.rows, eager.rows)
    assert dispatcher.code.served() >= 9


def test_a_position_beyond_the_cache_raises_as_in_pytorch() -> None:
    served, _ = _dispatched(Cache().eval())
    x = torch.randn(2, 1, 4)
    for pos in (0, 1, 2, -1):
        served(x, pos)
    for pos in (32, -33):
        with pytest.raises(IndexError):
            served(x, pos)


class Listed(nn.Module):
    """Indexes by a list that holds a number."""

    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.tanh(x * 2)
        y[[n]] = 1.0
        return y[[n, 0]] - 1


def test_a_number_in_a_list_of_indices_is_refused_by_name() -> None:
    served, dispatcher = _dispatched(Listed())
    for n in (0, 1, 2, -1):
        x = torch.randn(3, 4)
        torch.testing.assert_close(served(x, n), Listed()(x, n))
    assert "indexes by it and by something else" in dispatcher.code.policy.numbers.why["n", int]

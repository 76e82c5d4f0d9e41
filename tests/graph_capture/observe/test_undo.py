"""What the runs of a capture change outside the module is as in eager PyTorch afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import BridgeError, add_tvm_dispatch, capture, optimize_fx

COUNT = 0
LOG: list[Any] = []
NESTED: dict[str, list[int]] = {"calls": []}
TOTAL = torch.zeros(3)
CACHE: dict[str, torch.Tensor] = {}
NUMBERS = (number for number in itertools.count())


class Settings:
    calls = 0
    seen: list[int] = []


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


SLOTTED = Slotted()


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.scales = [1.0]


OTHER = Other()


class Model(nn.Module):
    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = act
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(self, x)
        return self.linear(x).relu()


def _counts(*_: Any) -> None:
    global COUNT
    COUNT += 1
    NESTED["calls"].append(COUNT)


def _of_classes(*_: Any) -> None:
    Settings.calls += 1
    Settings.seen.append(1)
    SLOTTED.calls += 1


def _before_a_branch(_: Any, x: torch.Tensor) -> None:
    LOG.append(1)
    if x.sum() > 1e9:
        LOG.clear()


def _before_an_error(_: Any, x: torch.Tensor) -> None:
    LOG.append(1)
    x.data_ptr()


def _of_another_module(*_: Any) -> None:
    OTHER.calls += 1
    OTHER.scales.append(2.0)


def _keeps_a_result(_: Any, x: torch.Tensor) -> None:
    LOG.append(x * 2)


def _takes_a_number(*_: Any) -> None:
    next(NUMBERS)


EFFECTS = (
    _counts,
    _of_classes,
    _before_a_branch,
    _before_an_error,
    _of_another_module,
    _keeps_a_result,
    _takes_a_number,
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    LOG.clear()
    CACHE.clear()
    TOTAL.zero_()


def _state() -> list[Any]:
    frame = NUMBERS.gi_frame  # type: ignore[attr-defined]
    classes = [Settings.calls, list(Settings.seen), SLOTTED.calls]
    others = [OTHER.calls, list(OTHER.scales), frame.f_locals.get("number")]
    return [COUNT, list(map(type, LOG)), list(NESTED["calls"]), classes, others]


DOORS = [*((add_tvm_dispatch, act) for act in EFFECTS), (optimize_fx, _counts), (capture, _counts)]


@pytest.mark.parametrize(("door", "act"), DOORS)
def test_a_refusal_changes_nothing_outside(door: Any, act: Callable[..., Any]) -> None:
    before, lists = _state(), [NESTED["calls"], Settings.seen, OTHER.scales]
    try:
        door(Model(act).eval(), torch.ones(2, 3))
        refused = False
    except BridgeError:
        refused = True
    assert refused or act is _before_a_branch  # which is served in parts
    assert _state() == before
    assert [NESTED["calls"], Settings.seen, OTHER.scales] == lists


@pytest.mark.parametrize("act", [_counts, _of_another_module, _takes_a_number])
def test_a_call_that_falls_back_has_its_effect_once(act: Callable[..., Any]) -> None:
    plain = Model(act).eval().requires_grad_(False)
    module = add_tvm_dispatch(Model(act).eval().requires_grad_(False))
    states = []
    for each in (plain, plain, module):
        each(torch.ones(2, 3))
        states.append(_numbers(_state()))
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(states)]
    assert any(steps[0])
    assert steps[0] == steps[1]


def _numbers(value: list[Any]) -> list[int]:
    """Return the numbers in a state, and the lengths of its lists."""
    lists = [len(value[1]), len(value[2]), len(value[3][1]), len(value[4][1])]
    return [value[0], *lists, value[3][0], value[3][2], value[4][0], value[4][2] or 0]


def _adds(module: Model, x: torch.Tensor) -> None:
    TOTAL.add_(1)
    module.last = x


def test_a_real_run_before_a_capture_writes_into_no_global() -> None:
    module = add_tvm_dispatch(Model(_adds).eval().requires_grad_(False), torch.ones(2, 3))
    assert TOTAL.tolist() == [0, 0, 0]
    module(torch.ones(2, 3))
    assert TOTAL.tolist() == [1, 1, 1]


def _fills(module: Model, x: torch.Tensor) -> None:
    if "weight" not in CACHE:
        CACHE["weight"] = module.linear.weight
    module.last = x @ CACHE["weight"]


@pytest.mark.parametrize("given", [True, False])
def test_a_cache_gets_the_parameter_itself(given: bool) -> None:
    module, plain = Model(_fills).eval().requires_grad_(False), Model(_fills)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 3)
    try:
        add_tvm_dispatch(module, x) if given else add_tvm_dispatch(module)
    except BridgeError:
        assert not CACHE
    for _ in range(3):
        module.linear.weight.mul_(2)
        module(x)
        assert CACHE["weight"] is module.linear.weight
        torch.testing.assert_close(module.last, x @ module.linear.weight)


def test_data_of_an_unregistered_module_are_compared() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for scale in OTHER.scales:
                x = x * scale
            return x.sin()

    before, x = list(OTHER.scales), torch.ones(3)
    module = add_tvm_dispatch(Scaled().eval(), x)
    try:
        torch.testing.assert_close(module(x), Scaled()(x))
        OTHER.scales.append(3.0)
        torch.testing.assert_close(module(x), Scaled()(x))
    finally:
        OTHER.scales[:] = before


class Uncopied(Model):
    """A module that has no copy, so that its own attributes are observed."""

    def __init__(self) -> None:
        super().__init__(lambda module, _: module.log.append(1))
        self.lock = (None for _ in range(1))
        self.log: list[int] = []


def test_a_module_without_a_copy_keeps_its_lists() -> None:
    module = Uncopied().eval()
    with pytest.raises(BridgeError, match="writes log"):
        add_tvm_dispatch(module, torch.ones(2, 3))
    assert module.log == []

"""Variables of enclosing functions after ``gc.freeze()``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch
from tvmbridge.graph_capture.observe.frozen import reachable_functions

_REGISTRY: dict[str, list[Any]] = {}


def _scaled(scales: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * scales[0]

    return scale


class _Scale(nn.Module):
    """A module whose forward calls a function that ``hold`` returns."""

    def __init__(self, hold: Callable[[], Callable[..., torch.Tensor]]) -> None:
        super().__init__()
        self.hold = hold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hold()(x)


class _Registry:
    """An object whose attribute has the function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.held = {"function": [function]}


@pytest.fixture(autouse=True)
def frozen_count() -> Iterator[None]:
    before = gc.get_freeze_count()
    yield
    _REGISTRY.clear()
    if not before:
        gc.unfreeze()


@pytest.mark.parametrize("place", but_slow(["module", "registry"], "registry"))
def test_closures_are_watched_and_objects_stay_frozen(place: str) -> None:
    scales = [2.0]
    if place == "module":
        function = _scaled(scales)
        module = _Scale(lambda: function)
    else:
        _REGISTRY["all"] = [_Registry(_scaled(scales))]
        module = _Scale(lambda: _REGISTRY["all"][0].held["function"][0])
    x = torch.randn(3)
    gc.freeze()
    count = gc.get_freeze_count()
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), x * 2)
    scales[0] = 3.0
    torch.testing.assert_close(module(x), x * 3)
    assert gc.get_freeze_count() > count // 2  # Some objects have died.


def test_the_functions_near_the_module_are_found_first() -> None:
    near, far = _scaled([1.0]), _scaled([2.0])
    order = []
    for function in reachable_functions([[[[[far]]], near], [near, [[[far]]]]]):
        order += [function] if function in (near, far) else []
        if len(order) == 2:
            break
    assert order == [near, far]

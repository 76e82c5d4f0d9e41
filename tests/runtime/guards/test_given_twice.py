"""A call may pass one tensor for two arguments, with and without the guards' compiled C++ half."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch
from tvmbridge.runtime.guards import watch


@pytest.fixture(params=["compiled half", "Python"])
def _half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(watch, "native_half", lambda: None)
    elif watch.native_half() is None:
        pytest.skip("the compiled half of the guards was not built")


@pytest.mark.usefixtures("_half")
def test_one_tensor_may_be_given_twice() -> None:
    x, y = torch.randn(3), torch.randn(3)
    for check in (watch.alike([x, x]), watch.alike([x, y])):
        assert check(x, y)
        assert check(y, y)
        assert not check(x, torch.randn(4))
    assert watch.watch((), (), (x, y, x)).unchanged()


class Loss(nn.Module):
    """A loss whose labels may be the input itself, of two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.other(self.one(x).tanh()) - labels).square().sum()


@pytest.mark.usefixtures("_half")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_calls_with_one_tensor_twice_take_the_fast_path(train: bool) -> None:
    module, x = Loss().train(train), torch.randn(3, 4)
    add_tvm_dispatch(module, (x, x))
    for _ in range(3):
        with torch.set_grad_enabled(train):
            loss = module(x, x)
        if train:
            loss.backward()
    ((fast, _),) = module.forward.code.paths.known
    with torch.set_grad_enabled(train):
        assert fast.guard.check((x, x), {}) is not None

"""The stand-ins of a trace share containers as their modules do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.capture import capture


class Borrows(nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared[0]  # type: ignore[no-any-return]


class Lends(nn.Module):
    """Puts a result into a shared container for another module, and restores the container."""

    def __init__(self, kind: type, held: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        of_its_own = self.weight if held == "a parameter" else torch.zeros(3)
        self.shared: Any = [of_its_own] if kind is list else {0: of_its_own}
        self.borrows = Borrows(self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.shared[0]
        self.shared[0] = x * self.weight * 2
        y = self.borrows(x)
        self.shared[0] = before
        return y  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "held", "joint"),
    [(list, "a parameter", "auto"), (dict, "a tensor", "auto"), (dict, "a parameter", "aot")],
)
def test_a_container_that_two_modules_share_is_one(kind: type, held: str, joint: str) -> None:
    plain = Lends(kind, held).double()
    module = copy.deepcopy(plain)
    assert module.shared is module.borrows.shared
    # A deep copy or ``double()`` does not update the tensor in the shared container.
    module.shared[0] = module.weight if held == "a parameter" else module.shared[0].double()
    x = torch.randn(3, dtype=torch.float64)
    add_tvm_dispatch(module, x, options={"joint": joint})
    results = []
    for each in (module, plain):
        y = each(x)
        y.square().sum().backward()
        with torch.no_grad():
            results.append((y, each.weight.grad, each(x)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)
    assert not dispatch_report(module).fallbacks
    assert module.shared is module.borrows.shared


def test_after_a_capture_containers_are_those_that_were_there() -> None:
    module = Lends(list, "a parameter")
    shared = module.shared
    capture(module, torch.randn(3))
    assert module.shared is shared is module.borrows.shared

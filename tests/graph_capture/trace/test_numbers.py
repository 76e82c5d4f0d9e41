"""Numbers out of a dtype's range: calls that eager PyTorch refuses are refused here too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.frontend.helpers import Function, assert_like_eager
from tvmbridge import UnsupportedOperatorError, add_tvm_dispatch

X = torch.ones(2, 2)

REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: torch.add(x, x, alpha=1e40),
    "written": lambda x: x.clone().sub_(x, alpha=-1e40),
    "product": lambda x: torch.addmm(x, x, x, beta=1e40),
    "activation": lambda x: functional.leaky_relu(x, 1e40),
    "filled": lambda x: x.masked_fill(x > 0, -1e40),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_in_eager(name: str) -> None:
    with pytest.raises(RuntimeError, match="without overflow"):
        REFUSED[name](X)
    with pytest.raises(UnsupportedOperatorError, match="without overflow"):
        add_tvm_dispatch(Function(REFUSED[name]), (X,))


def test_what_eager_takes_is_served() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        least = torch.sub(x, x * 3, alpha=-(2**63))
        return x * 1e40, x + 10**12, least, torch.rsub(x, x, alpha=-(2**63))

    assert_like_eager(function, X)

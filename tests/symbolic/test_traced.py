"""Sizes of a symbolic trace: quotients, minima, and functions that PyTorch traces for one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.symbolic.code import traced_for
from tvmbridge.symbolic.sizes import Size, Sizes
from tvmbridge.symbolic.symbols import LinearSize, Symbols
from tvmbridge.symbolic.traced import traced_sizes


class Calls(nn.Module):
    """A module that calls one function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


def test_quotients_of_a_trace_are_functions_of_the_symbols_of_the_code() -> None:
    symbols = Symbols((((0, 0),),), {(0, 0): LinearSize(2, 1)})
    module = Calls(lambda x: functional.conv1d(x.t()[None], torch.ones(1, 2, 3), stride=3))
    trace = traced_for(module, symbols, ((torch.randn(9, 2),), {}), needs_grad=False, autocast=())
    found = traced_sizes(trace, symbols)
    for symbol in (4, 5, 9, 30):
        values = {size.at((symbol,)) for size in found}
        assert (2 * symbol + 1 - 3) // 3 + 1 in values
        assert 2 * symbol + 1 in values


def test_a_size_of_the_trace_is_found_where_no_guess_would_find_it() -> None:
    points, values = [(23,), (478,), (5,)], (41, 837, 9)
    quotient = Size(((7, (1,)), (3, (0,))), 4)
    assert Sizes(points).find_divided(values) is None
    assert Sizes(points, [quotient]).find_divided(values) == quotient
    # Products of the quotient are sizes as well.
    more = Sizes(points, [quotient]).find_divided(tuple(6 * v for v in values))
    assert more is not None
    assert more.at((11,)) == 6 * 20


_CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "quotient": (lambda x: functional.pdist(x), lambda n: (torch.randn(n, 5),)),
    "minimum": (lambda x: x.diag(2), lambda n: (torch.randn(n, 10),)),
    "few sizes": (lambda x: x.diagonal(-2), lambda n: (torch.randn(n, 5, 5),)),
    "kron": (torch.kron, lambda n: (torch.randn(n, 2), torch.randn(3, 4))),
    "multi_dot": (
        lambda x, y, z: torch.linalg.multi_dot([x, y, z]),
        lambda n: (torch.randn(n, 4), torch.randn(4, 3), torch.randn(3)),
    ),
    "take_along_dim": (
        lambda x, i: torch.take_along_dim(x, i, 0),
        lambda n: (torch.randn(n, 5), torch.randint(-2 * n, 2 * n, (n, 1))),
    ),
    "block_diag": (
        lambda x, y: torch.block_diag(x, y),
        lambda n: (torch.randn(n, 3), torch.randn(2, 5)),
    ),
    "powers": (torch.pow, lambda n: (torch.rand(n, 1, 5), torch.randn(1, 10, 5))),
}


_QUICK = ("minimum", "take_along_dim")


@pytest.mark.parametrize(
    "name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in _CASES]
)
def test_functions_are_served_at_all_sizes(name: str) -> None:
    torch.manual_seed(0)
    function, arguments = _CASES[name]
    module: Any = Calls(function).eval()
    first = arguments(5)
    add_tvm_dispatch(
        module,
        first,
        dynamic_shapes=(({0: Dim("rows", min=2)}, *({} for _ in first[1:])),)
        if name != "take_along_dim"
        else (tuple({0: Dim("rows", min=2)} for _ in first),),
        on_fallback="silent",
    )
    sizes = (5, 8, 11, 9, 12, 40)
    for size in sizes:
        given = arguments(size)
        exact = function(*(x.double() if x.is_floating_point() else x for x in given))
        torch.testing.assert_close(module(*given).double(), exact, rtol=1e-5, atol=1e-5)
    report = dispatch_report(module)
    assert report.tvm_calls == len(sizes), report.fallbacks

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
from tvmbridge.graph_capture.trace.sized_functions import _FUNCTIONS
from tvmbridge.symbolic.code import traced_for
from tvmbridge.symbolic.size import Size
from tvmbridge.symbolic.sizes import Sizes
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
    found = _sizes_in(lambda x: x[::3].exp(), symbols)
    for symbol in (4, 5, 9, 30):
        values = {size.at((symbol,)) for size in found}
        assert (2 * symbol + 1 + 2) // 3 in values
        assert 2 * symbol + 1 in values


def test_the_extent_that_a_stride_leaves_is_one_quotient() -> None:
    symbols = Symbols((((0, 0),),), {(0, 0): LinearSize(1, 0)})
    weights = torch.ones(1, 2, 3)
    found = _sizes_in(lambda x: functional.conv1d(x.t()[None], weights, stride=3), symbols)
    (quotient,) = (size for size in found if size.divisor > 1)
    assert not quotient.atoms
    assert [quotient.at((n,)) for n in (3, 4, 9, 30)] == [1, 1, 3, 10]
    # A product of two extents needs no further number.
    values = tuple(quotient.at((n,)) ** 2 for n in (23, 478, 17))
    square = Sizes([(23,), (478,), (17,)], found).find(values)
    assert square is not None
    assert square.at((100,)) == 33**2


def _sizes_in(function: Callable[..., torch.Tensor], symbols: Symbols) -> list[Size]:
    given = (torch.randn(9, 2),)
    trace = traced_for(Calls(function), symbols, (given, {}), needs_grad=False, autocast=())
    return traced_sizes(trace, symbols)


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


_OF_THREE = {
    "two remainders": lambda x, y: (
        x[: x.shape[0] // 3].sum(0) + y[: (y.shape[0] + 1) // 3].exp().sum(0)
    ),
    "all remainders": lambda x, y: x[::3].sum(0) + y[1::3].exp().sum(0) + y[2::3].sin().sum(0),
}


@pytest.mark.parametrize("name", _OF_THREE)
def test_quotients_that_agree_at_many_sizes_are_told_apart(name: str) -> None:
    torch.manual_seed(0)
    module: Any = Calls(_OF_THREE[name]).eval()
    first = torch.randn(9, 4), torch.randn(9, 4)
    rows = Dim("rows", min=2)
    add_tvm_dispatch(module, first, dynamic_shapes=(({0: rows}, {0: rows}),), on_fallback="silent")
    for size in (9, 16, 17, 33, 34, 35, 103):
        x, y = torch.randn(size, 4), torch.randn(size, 4)
        exact = _OF_THREE[name](x.double(), y.double())
        torch.testing.assert_close(module(x, y).double(), exact, rtol=1e-5, atol=1e-5)
    assert dispatch_report(module).tvm_calls == 7


def test_sizes_that_agree_at_all_points_are_none() -> None:
    points = [(24,), (478,), (6,)]
    values = tuple(n // 3 for (n,) in points)
    third, other, same = (
        Size(terms, 3) for terms in (((1, (1,)),), ((1, (1,)), (1, (0,))), ((1, (1,)), (0, (0,))))
    )
    assert Sizes(points, [third]).find_divided(values) == third
    assert Sizes(points, [third, other]).find_divided(values) is None
    assert Sizes(points, [third, same]).find_divided(values) == third


_MIXED = torch.float64, torch.float32


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch.take_along_dim, (torch.randn(4, 3), torch.ones(1, 1, dtype=torch.int32), 0)),
        (torch.take_along_dim, (torch.randn(4, 3), torch.ones(1, 1, dtype=torch.int64), 5)),
        (torch.take_along_dim, (torch.randn(4, 3), torch.ones(1, dtype=torch.int64), 0)),
        (torch.take_along_dim, (torch.randn(()), torch.tensor(0), 0)),
        (torch.block_diag, (torch.randn(2, 2, 2),)),
        (torch.block_diag, (torch.randn(2), torch.tensor(1.0, dtype=torch.float64))),
        (torch.linalg.multi_dot, ([torch.randn(2, 3)],)),
        (torch.linalg.multi_dot, ([torch.randn(2, 2, 3), torch.randn(3, 4)],)),
        (torch.linalg.multi_dot, ([torch.randn(2, 2, dtype=d) for d in _MIXED],)),
    ],
)
def test_arguments_that_a_replacement_is_not_for_are_pytorchs(
    function: Callable[..., torch.Tensor], arguments: tuple[Any, ...]
) -> None:
    assert _FUNCTIONS[function](*arguments) is None


def test_an_index_without_a_dimension_is_not_wrapped() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        _FUNCTIONS[torch.take_along_dim](torch.randn(4), torch.tensor([-1]))

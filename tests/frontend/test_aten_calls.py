"""ATen calls pass all kinds of arguments and results, and fail as eager PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import tvmbridge
from tests.conformance.compare import compare
from tests.frontend.helpers import Cases, Function, Together, run

INF = float("inf")
X = torch.arange(24.0).reshape(2, 3, 4) - 9
INDEX = torch.tensor([1, 0])

CASES: Cases = {
    "None in a list": (lambda x, i: (x[:, i], x[:, :, i], x[i, :, i]), (X, INDEX)),
    "infinite numbers": (lambda x: (x.nan_to_num(0, INF, -INF), torch.full_like(x, -INF)), (X,)),
    "number nan": (lambda x: functional.threshold(x, 0.0, float("nan")), (X,)),
    "a dtype": (lambda x: (x.cumsum(0, dtype=torch.float64), x.to(torch.int32)), (X,)),
    "a memory format": (
        lambda x: x.clone(memory_format=torch.channels_last) + 1,
        (torch.ones(1, 2, 3, 4),),
    ),
    "a device": (lambda x: x.to("cpu", torch.float16), (X,)),
    "a string": (lambda x: torch.searchsorted(x[0, 0], x, side="right"), (X,)),
    "several results": (lambda x: (x.sort(1), x.topk(2), torch.frexp(x)), (X,)),
    "some of several results": (lambda x: (x.sort(1)[1], x.max(1).values), (X,)),
    "a list of results": (
        lambda x: (x.tensor_split(3, 2), torch.meshgrid(x[0, 0], x[0, :, 0], indexing="xy")),
        (X,),
    ),
    "empty among the results": (lambda x: x.split([0, 2, 1], 1), (X,)),
    "results not contiguous": (lambda x: (x.diagonal(0, 1, 2), x.unfold(2, 2, 1)), (X,)),
    "an alias of an argument": (lambda x: (torch.real(x.cumsum(0)), x.cumsum(0).diagonal()), (X,)),
    "0-d results": (lambda x: (x.argmax(), x.median(), x.norm(), torch.dist(x, x + 1)), (X,)),
    "bool results": (lambda x: (torch.signbit(x), torch.isclose(x, x.round()), x.isinf()), (X,)),
    "bytes": (lambda x: (x.to(torch.uint8).sort()[0], x.to(torch.int8) // 2), (X.abs(),)),
    "halves": (
        lambda x: (x.bfloat16().cumsum(1), x.half().sort().values, x.bfloat16().log1p()),
        (X.abs(),),
    ),
    "in a chain": (lambda x: ((x.cumsum(0) + 1).sort(1)[0] * 2).roll(1, 0).exp2().sum(), (X / 9,)),
    "of empty tensors": (lambda x: (x.sort(1), x.cumsum(0), x.log1p(), x.sum(1)), (X[:, :0],)),
    "of strided inputs": (lambda x: (x.cumsum(0), x.sort(0)), (X.permute(2, 0, 1)[::2],)),
}

TOGETHER = Together(CASES)


@pytest.mark.parametrize("name", CASES)
def test_like_eager(name: str) -> None:
    """Check that the call has PyTorch's dtypes, shapes and values."""
    TOGETHER.assert_like_eager(name)


def test_results_are_views_of_inputs_where_they_are_in_eager() -> None:
    """Check that a write into a result changes the input exactly when it does so in eager."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.diagonal(0, 1, 2), x.unfold(2, 2, 1), x.mT.contiguous()

    ours, theirs = X.clone(), X.clone()
    for number, tensor in enumerate(run(forward, ours)[0]):
        tensor.fill_(number)
    for number, tensor in enumerate(forward(theirs)):
        tensor.fill_(number)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [7, -1])
def test_index_out_of_range(bad: int) -> None:
    """Check that an index that eager refuses raises IndexError, and that the module still works."""
    module = torch.nn.Embedding(7, 4).eval()
    good = torch.tensor([[0, 6]])
    with torch.no_grad():
        expected = module(good)
        tvmbridge.add_tvm_dispatch(module, (good,))
        with pytest.raises(IndexError):
            module(torch.tensor([[0, bad]]))
        assert torch.equal(module(good), expected)


@pytest.mark.parametrize(
    "function", [lambda x, i: x[i], lambda x, i: x.index_select(0, i), lambda x, i: x.take(i)]
)
def test_index_tensors_out_of_range(function: Callable[..., Any]) -> None:
    """Check that bounds are checked wherever eager checks them."""
    module = Function(function).eval()
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (X, INDEX))
        with pytest.raises((IndexError, RuntimeError)):
            module(X, torch.tensor([0, 99]))
        assert torch.equal(module(X, INDEX), function(X, INDEX))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.complex(x, x),
        lambda x: torch.fft.rfft(x),
        lambda x: x * len(x.nonzero()),
        lambda x: x if x.sum().item() > 0 else -x,
    ],
)
def test_refused_with_a_reason(function: Callable[..., Any]) -> None:
    """Check that unsupported calls raise a BridgeError and leave the module's forward in place."""
    module = Function(function).eval()
    with torch.no_grad():
        with pytest.raises(tvmbridge.BridgeError):
            tvmbridge.add_tvm_dispatch(module, (X,), on_break="forward")
        assert "forward" not in module.__dict__


def test_results_that_depend_on_data_are_those_of_eager() -> None:
    """Check results with data-dependent shapes; compiled code serves the graph before them."""
    for function in (
        lambda x: x.cumsum(0).nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.sum().item(),
    ):
        module = Function(function).eval()
        with torch.no_grad():
            tvmbridge.add_tvm_dispatch(module, (X,))
            for x in (X, -X):
                assert compare(module(x), function(x), values=True) is None


def test_equal_elements_are_sorted_as_eager_sorts_them() -> None:
    """Check a sort along a stride of 0: eager keeps the order, but would not for a copy."""
    row = torch.full((1, 3), 2.0)
    expanded, dense = row.expand(3000, 3), row.repeat(3000, 1)
    assert not torch.equal(expanded.argsort(0), dense.argsort(0))
    module = Function(lambda x: (x.sort(0)[1], x.argsort(0, descending=True), x.msort())).eval()
    with torch.no_grad():
        expected = [module(expanded), module(dense)]
        tvmbridge.add_tvm_dispatch(module, (expanded,))
        for x, theirs in zip((expanded, dense), expected, strict=True):
            assert all(map(torch.equal, module(x), theirs))
        tvmbridge.add_tvm_dispatch(module, (dense,))
        for x, theirs in zip((expanded, dense), expected, strict=True):
            assert all(map(torch.equal, module(x), theirs))

"""Functions with data-dependent checks: values, gradients and errors equal eager PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from tests.frontend.helpers import Function
from tests.thinned import thinned
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.trace.function_table import FunctionTable

LENGTHS = torch.tensor([6, 5, 4])
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "quantile": lambda x, p: torch.quantile(
        x, p.detach(), dim=-1, keepdim=True, interpolation="midpoint"
    ),
    "quantile by a number": lambda x, p: x.quantile(0.4),
    "nanquantile": lambda x, p: torch.nanquantile(x, p.detach(), dim=0),
    "nanquantile by a number": lambda x, p: x.nanquantile(0.9, 1),
    "cov": lambda x, p: torch.cov(x, correction=0, aweights=p),
    "cov of one variable": lambda x, p: x[0].cov(),
    "corrcoef": lambda x, p: torch.corrcoef(x),
    "combinations": lambda x, p: torch.combinations(x[0], 3) * 2,
    "gaussian_nll_loss": lambda x, p: functional.gaussian_nll_loss(x, x * 2, p.expand_as(x)),
    "gaussian_nll_loss, full": lambda x, p: nn.GaussianNLLLoss(full=True, reduction="none")(
        x, p[:3, None], x * x
    ),
    "ctc_loss": lambda x, p: functional.ctc_loss(
        x.t()[:, :, None].expand(6, 3, 4).log_softmax(-1) * p[0],
        torch.ones(3, 2, dtype=torch.int64),
        LENGTHS,
        LENGTHS - 4,
        reduction="none",
        zero_infinity=True,
    ),
}


def _all(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return the doubled results of all functions in one tensor."""
    return torch.cat([(f(x, p) * 2).reshape(-1) for f in FUNCTIONS.values()])


def _sample() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)


def test_forward_and_gradient_are_those_of_eager_pytorch() -> None:
    plain = Function(_all)
    module = copy.deepcopy(plain).train()
    x, p = (t.requires_grad_() for t in _sample())
    add_tvm_dispatch(module, (x, p))
    report = dispatch_report(module)
    assert {n.split(".")[1] for n in report.aten_calls if n.startswith("tvmbridge.")} == {
        *("quantile", "nanquantile", "cov", "corrcoef", "gaussian_nll_loss", "ctc_loss"),
        *("combinations", "combinations_backward"),
        *("quantile_backward", "nanquantile_backward", "cov_backward", "corrcoef_backward"),
        *("gaussian_nll_loss_backward", "ctc_loss_backward"),
    }
    for x, p in (_sample(), _sample()):
        results = []
        for called in (module, plain):
            leaves = [x.clone().requires_grad_(), p.clone().requires_grad_()]
            out = called(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        torch.testing.assert_close(*results)
    assert dispatch_report(module).tvm_calls == 2


def test_one_call_makes_all_gradients_of_a_function() -> None:
    x, y, v = (torch.rand(3, 6, dtype=torch.float64).requires_grad_() for _ in range(3))
    expected = torch.autograd.grad(functional.gaussian_nll_loss(x, y, v), (x, y, v))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        result = torch.ops.tvmbridge.gaussian_nll_loss(x, y, v)
        found = torch.autograd.grad(result, (x, y, v))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls["tvmbridge::gaussian_nll_loss_backward"] == 1


def test_what_the_data_forbids_raises_as_in_eager_pytorch() -> None:
    def forward(x: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.quantile(x, q),
            functional.gaussian_nll_loss(x, x, v),
            torch.cov(x, aweights=v),
        ]

    x, q, v = torch.randn(4), torch.rand(2), torch.rand(4)
    plain = Function(forward).eval()
    module = copy.deepcopy(plain)
    with torch.no_grad():
        add_tvm_dispatch(module, (x, q, v))
        for bad in ((x, q + 1, v), (x, q, -v), (x, q, v * 0)):
            with pytest.raises((RuntimeError, ValueError)) as expected:
                plain(*bad)
            with pytest.raises(type(expected.value), match=r"\w+") as raised:
                module(*bad)
            assert str(expected.value).splitlines()[0] in str(raised.value)
        torch.testing.assert_close(module(x, q, v), plain(x, q, v))
    report = dispatch_report(module)
    assert report.tvm_calls >= 1
    assert not report.fallbacks


def test_values_that_kernels_refuse_are_refused() -> None:
    def forward(x: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        return [
            functional.binary_cross_entropy(x, x / 2),
            functional.one_hot(k, num_classes=4),
            x.index_copy(0, k, -x[:2]),
        ]

    x, k = torch.rand(3), torch.tensor([0, 2])
    plain = Function(forward).eval()
    module = copy.deepcopy(plain)
    add_tvm_dispatch(module, (x, k))
    for bad in ((x + 1, k), (x, k + 2), (x, -k)):
        with pytest.raises((RuntimeError, IndexError)) as expected:
            plain(*bad)
        with pytest.raises(type(expected.value), match=r"\w+") as raised:
            module(*bad)
        assert str(expected.value).splitlines()[0] in str(raised.value)
    torch.testing.assert_close(module(x, k), plain(x, k))
    assert not dispatch_report(module).fallbacks


_BY_ANOTHER_NAME = torch._assert_async


@pytest.mark.parametrize("function", [_BY_ANOTHER_NAME, torch.ops.aten._assert_async.default])
def test_an_assertion_that_is_not_noted_is_refused_by_name(function: Any) -> None:
    module = Function(lambda x: (function(x.sum() > 0), x * 2)[1]).eval()
    with pytest.raises(BridgeError, match="asserts something of values"):
        add_tvm_dispatch(module, torch.ones(2))


def test_results_have_the_shapes_that_are_foretold() -> None:
    x = torch.randn(4, 5)
    cases: list[tuple[Callable[..., torch.Tensor], tuple[object, ...], dict[str, object]]] = [
        (torch.quantile, (x, 0.5), {"keepdim": True}),
        (torch.quantile, (x, torch.rand(3)), {"keepdim": True}),
        (torch.quantile, (x, torch.rand(3), -1), {}),
        (torch.quantile, (x[0, 0], 0.5, 0), {"keepdim": True}),
        (torch.nanquantile, (x, torch.rand(()), 0, True), {}),
        (torch.cov, (x[:1],), {}),
        (torch.cov, (x.long(),), {}),
        (torch.cov, (x[:0],), {}),
        (torch.corrcoef, (x[0, 0],), {}),
        *((torch.combinations, (x[0], r, again), {}) for r in (0, 2, 7) for again in (True, False)),
        (torch.combinations, (x[0, :0], 2, True), {}),
        (functional.gaussian_nll_loss, (x, x, x[:, 0].abs()), {"reduction": "none"}),
        (functional.gaussian_nll_loss, (x, x, x[:, :1].abs()), {"reduction": "none"}),
        (functional.gaussian_nll_loss, (x, x[0], 2.0), {"reduction": "none"}),
        (functional.ctc_loss, (x, torch.tensor([1, 2]), (4,), (2,)), {"reduction": "none"}),
    ]
    for function, args, kwargs in cases:
        expected = function(*args, **kwargs)
        fake = torch._subclasses.fake_tensor.FakeTensorMode()
        given = [fake.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        with fake, FunctionTable():
            foretold = function(*given, **kwargs)
        assert (foretold.shape, foretold.dtype) == (expected.shape, expected.dtype), function


def test_gradients_of_products_with_zeros_and_nan_are_those_of_eager_pytorch() -> None:
    def forward(*x: torch.Tensor) -> list[torch.Tensor]:
        y = x[4] * 1
        y.cumprod_(1)
        return [x[0].prod(), torch.prod(x[1], 1, keepdim=True), x[2].prod(0), x[3].cumprod(-1), y]

    values = torch.randn(4, 5, dtype=torch.float64)
    values[0, 1] = values[0, 3] = values[1, 0] = values[2, 2] = 0.0
    values[0, 4] = values[2, 4] = torch.nan
    plain = Function(forward)
    module = copy.deepcopy(plain).train()
    add_tvm_dispatch(module, tuple(torch.rand_like(values).requires_grad_() for _ in range(5)))
    found = []
    for called in (module, plain):
        leaves = [values.clone().requires_grad_() for _ in range(5)]
        out = called(*leaves)
        gradients = torch.autograd.grad(out, leaves, [torch.full_like(o, 2) for o in out])
        found.append([*(o.detach() for o in out), *gradients])
    torch.testing.assert_close(*found, equal_nan=True)
    assert dispatch_report(module).tvm_calls == 1


def test_products_stay_plain_operators_where_no_gradient_flows() -> None:
    plain = Function(lambda x: x.prod(1) + x.cumprod(1)[:, 0]).eval()
    module = copy.deepcopy(plain)
    x = torch.randn(3, 4)
    with torch.no_grad():
        add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), plain(x))
    assert not [n for n in dispatch_report(module).aten_calls if n.startswith("tvmbridge.")]


class _Denoised(nn.Module):
    """A weighted short-time Fourier transform and its inverse, which checks the window's values."""

    def __init__(self, *, learns: bool, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 1, dtype=torch.float64))
        window = torch.hann_window(16, dtype=torch.float64) + 0.1
        self.window = nn.Parameter(window, requires_grad=learns)
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        return torch.istft(frames * self.weight.tanh(), 16, 4, window=self.window, **self.settings)


@pytest.mark.parametrize(
    ("settings", "learns"),
    thinned(
        [({"length": 90}, True), ({"length": 50}, False), ({"center": False}, False), ({}, True)], 4
    ),
)
def test_inverse_transforms_of_frames_are_those_of_eager(
    settings: dict[str, Any], learns: bool
) -> None:
    plain = _Denoised(learns=learns, **settings).train()
    module = copy.deepcopy(plain)
    add_tvm_dispatch(module, torch.randn(2, 64, dtype=torch.float64).requires_grad_())
    found = []
    x = torch.randn(2, 64, dtype=torch.float64)
    for called in (module, plain):
        leaves = [x.clone().requires_grad_(), *(p for p in called.parameters() if p.requires_grad)]
        out = called(leaves[0])
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert dispatch_report(module).fallbacks == {}


def test_a_window_that_closes_frames_raises_what_it_raises_in_eager() -> None:
    module = add_tvm_dispatch(_Denoised(learns=False).eval(), torch.randn(2, 64).double())
    with torch.no_grad():
        module.window.zero_()
        with pytest.raises(RuntimeError, match="window overlap add min"):
            module(torch.randn(2, 64).double())


_GROUPED = {
    "rows": ((8, 4), (3, 4, 12)),
    "the dimension that is summed over": ((4, 8), (8, 12)),
    "columns": ((3, 4, 12), (12, 8)),
    "batches": ((3, 4, 12), (3, 12, 8)),
}


@pytest.mark.parametrize("shapes", thinned(((s,) for s in _GROUPED.values()), 2), ids=_GROUPED)
def test_grouped_products_are_those_of_eager_pytorch(shapes: Any) -> None:
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    batches = len(shapes[0]) == len(shapes[1]) == 3

    def products(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(x.sin(), w, offs=None if batches else ends).cos()

    plain = Function(products)
    module = copy.deepcopy(plain).train()
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    add_tvm_dispatch(module, (*leaves, ends))
    for each in (ends, torch.tensor([0, 5, 8], dtype=torch.int32)):
        found, expected = (
            [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
            for y in (called(*leaves, each) for called in (module, plain))
        )
        torch.testing.assert_close(found, expected)
    assert dispatch_report(module).fallbacks == {}

"""Dropout in all its forms: masks of eager PyTorch's numbers, saved with one byte per element."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.graph_capture.test_noise import Applied
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.dispatch import _code_of

F = nn.functional
Form = Callable[[torch.Tensor, bool], torch.Tensor]


def _attention(**kwargs: object) -> Form:
    def form(x: torch.Tensor, t: bool) -> torch.Tensor:
        heads = x.reshape(1, 2, 6, 10)
        mask = {k: v(heads) if callable(v) else v for k, v in kwargs.items()}
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3 * t, **mask)  # type: ignore[arg-type]

    return form


def _grouped(x: torch.Tensor, t: bool) -> torch.Tensor:
    key = x.reshape(1, 2, 6, 10)
    query = torch.cat([key, key * 2], 1)
    return F.scaled_dot_product_attention(query, key, key, dropout_p=0.3 * t, enable_gqa=True)


FORMS: dict[str, Form] = {
    "dropout": lambda x, t: F.dropout(x, 0.3, t),
    "dropout, in place": lambda x, t: F.dropout(x * 2, 0.3, t, inplace=True),
    "dropout, asked for": lambda x, t: F.dropout(x, 0.3, training=True),
    "dropout, not asked for": lambda x, t: F.dropout(x, 0.3, training=False) * 2,
    "dropout of nothing": lambda x, t: F.dropout(x, 0.0, t) * 2,
    "dropout of all": lambda x, t: F.dropout(x, 1.0, t) + x,
    "native_dropout": lambda x, t: torch.native_dropout(x, 0.3, t)[0],
    "native_dropout, mask read": lambda x, t: x * torch.native_dropout(x, 0.3, t)[1],
    "dropout1d": lambda x, t: F.dropout1d(x, 0.4, t),
    "dropout1d, in place": lambda x, t: F.dropout1d(x * 2, 0.4, t, inplace=True),
    "dropout2d": lambda x, t: F.dropout2d(x[:, :, None], 0.4, t),
    "dropout3d": lambda x, t: F.dropout3d(x[:, :, None, None], 0.4, t),
    "feature_dropout": lambda x, t: torch.feature_dropout(x, 0.4, t),
    "alpha_dropout": lambda x, t: F.alpha_dropout(x, 0.4, t),
    "alpha_dropout, in place": lambda x, t: F.alpha_dropout(x * 2, 0.4, t, inplace=True),
    "alpha_dropout of all": lambda x, t: F.alpha_dropout(x, 1.0, t) + x,
    "feature_alpha_dropout": lambda x, t: F.feature_alpha_dropout(x, 0.4, t),
    "attention": _attention(),
    "causal attention": _attention(is_causal=True, scale=0.7),
    "masked attention": _attention(attn_mask=lambda h: h[..., :6] > -0.5),
    "shifted attention": _attention(attn_mask=lambda h: h[..., :6]),
    "grouped attention": _grouped,
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
}
CASES = [
    ("dropout", torch.bfloat16, "contiguous"),
    ("dropout", torch.float64, "permuted"),
    ("alpha_dropout", torch.bfloat16, "permuted"),
    ("dropout1d", torch.float32, "permuted"),
]


def make(dtype: torch.dtype, layout: str = "contiguous") -> torch.Tensor:
    x = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(5))
    return LAYOUTS[layout](x.to(dtype)).detach().requires_grad_()


def assert_same_step(ours: nn.Module, eager: nn.Module, *given: torch.Tensor) -> None:
    """Assert that outputs, gradients and the generator's next number equal eager's."""
    results = []
    for module in (ours, eager):
        torch.manual_seed(11)
        leaves = [x.detach().clone().requires_grad_() for x in given]
        y = module(*leaves)
        outputs = y if isinstance(y, list) else [y]
        cotangents = [
            torch.arange(o.numel()).reshape(o.shape).to(o.dtype) / o.numel() for o in outputs
        ]
        gradients = torch.autograd.grad(outputs, leaves, cotangents)
        results.append((*outputs, *gradients, torch.rand(3)))
    half = given[0].dtype is torch.bfloat16
    rtol, atol = (2**-6, 2**-8) if half else (1e-5, 1e-6)
    names = list(FORMS) if len(given) > 1 else ["the module"]
    names = [f"{name}, {what}" for what in ("output", "gradient") for name in names] + ["generator"]
    for name, mine, theirs in zip(names, *results, strict=True):
        bounds = {"rtol": rtol, "atol": atol}
        torch.testing.assert_close(mine, theirs, **bounds, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(results[0][-1], results[1][-1])


def dispatched(form: Form, x: torch.Tensor) -> tuple[nn.Module, nn.Module]:
    eager = Applied(form).train()
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, x)
    return ours, eager


def assert_masks_of_one_byte(module: nn.Module) -> None:
    for _, entry in _code_of(module).kept.known[0].compiled():
        assert all(n.spec.dtype is torch.bool for n in entry.compiled.captured.noise)


class AllForms(nn.Module):
    """Calls each form on an argument of its own."""

    def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
        return [form(x, self.training) for form, x in zip(FORMS.values(), given, strict=True)]


def test_all_forms_equal_eager() -> None:
    eager, given = AllForms().train(), tuple(make(torch.float32) for _ in FORMS)
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, given)
    assert_same_step(ours, eager, *given)
    assert_masks_of_one_byte(ours)
    assert dispatch_report(ours).fallbacks == {}


@pytest.mark.parametrize(("form", "dtype", "layout"), CASES)
def test_other_dtypes_and_layouts_equal_eager(form: str, dtype: torch.dtype, layout: str) -> None:
    x = make(dtype, layout)
    ours, eager = dispatched(FORMS[form], x)
    assert_same_step(ours, eager, x)
    assert_masks_of_one_byte(ours)
    assert dispatch_report(ours).fallbacks == {}


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "AlphaDropout": (lambda: nn.AlphaDropout(0.4), (3, 4, 10)),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.4), (3, 4, 10)),
    "Dropout2d": (lambda: nn.Dropout2d(0.4), (3, 4, 2, 5)),
    "Dropout3d": (lambda: nn.Dropout3d(0.4), (3, 4, 2, 5, 1)),
    "GRU": (lambda: _First(nn.GRU(10, 4, 2, dropout=0.4)), (3, 4, 10)),
    "MultiheadAttention": (lambda: _Attending(), (3, 4, 10)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(10, 2, 8, 0.4), (3, 4, 10)),
}


class _First(nn.Module):
    """A module that returns the first result of another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.inner(x)[0]
        return first


class _Attending(_First):
    """Self-attention with weights returned, for which PyTorch uses no fused attention."""

    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(10, 2, dropout=0.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.inner(x, x, x)
        return y + weights.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", thinned(MODULES, 4))
def test_modules_equal_eager(name: str) -> None:
    factory, shape = MODULES[name]
    eager = factory().double().train()
    ours, x = copy.deepcopy(eager), torch.randn(shape, dtype=torch.float64).requires_grad_()
    add_tvm_dispatch(ours, x)
    assert_same_step(ours, eager, x)
    assert_masks_of_one_byte(ours)
    assert dispatch_report(ours).fallbacks == {}


def test_another_layout_goes_to_the_module_itself() -> None:
    ours, eager = dispatched(lambda x, t: torch.tanh(F.dropout(x, 0.3, t)), make(torch.float32))
    assert_same_step(ours, eager, make(torch.float32, "permuted"))
    (reason,) = dispatch_report(ours).fallbacks
    assert "laid out otherwise" in reason


@pytest.mark.parametrize("draw", ["normal_", "uniform_", "exponential_", "bernoulli_"])
def test_draws_in_place_follow_the_memory(draw: str) -> None:
    """A draw into a strided slice fills elements one by one, as they are not contiguous."""

    def fill(x: torch.Tensor, training: bool) -> torch.Tensor:
        getattr(x[:, :, ::2], draw)()
        return x * 2

    eager = Applied(fill).train()
    ours, x = copy.deepcopy(eager), torch.randn(4, 6, 10)
    results = []
    with torch.no_grad():
        add_tvm_dispatch(ours, x.clone())
        for module in (ours, eager):
            torch.manual_seed(2)
            given = x.clone()
            results.append((module(given), given, torch.rand(2)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert dispatch_report(ours).tvm_calls == 1


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_what_drops_nothing_is_its_argument(p: float) -> None:
    def written(x: torch.Tensor, t: bool) -> torch.Tensor:
        held = x * 2
        same = F.dropout(held, p, t)
        same.add_(1)
        return same + held

    module = Applied(written).eval()
    x = make(torch.float64)
    expected = module(x)
    with torch.no_grad():
        add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), expected)

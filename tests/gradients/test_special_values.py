"""Gradients for infinite, NaN or extreme inputs and cotangents: NaN and infinities equal eager's.

``python -m tests.conformance --values special --modes auto`` does so for all samples of operators.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.conformance.made import Made
from tests.conformance.samples import cases_of_samples
from tests.conformance.special import SpecialCheck
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report

INF, NAN = math.inf, math.nan
Formula = Callable[[torch.Tensor], torch.Tensor]

# Formulas that TVM's Gradient differentiates; OTHER has formulas that it may not differentiate.
KNOWN: dict[str, Formula] = {
    "silu": functional.silu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": functional.softsign,
    "reciprocal": torch.reciprocal,
    "quotient": lambda x: 3.0 / x,
    "square": torch.square,
    "cube": lambda x: x**3,
    "power -1": lambda x: x**-1,
    "power -2": lambda x: x**-2,
    "power -1/2": lambda x: x**-0.5,
    "power 0": lambda x: x**0,
    "huge power": lambda x: x ** (2**31 + 1),
    "power beyond a float's integers": lambda x: x ** (2**53 + 1),
    "power of 0": lambda x: 0.0**x,
}
OTHER: dict[str, Formula] = {
    "mish": functional.mish,
    "softplus": functional.softplus,
    "elu": lambda x: functional.elu(x, 0.5),
    "selu": functional.selu,
    "hardswish": functional.hardswish,
    "logsigmoid": functional.logsigmoid,
    "leaky": lambda x: functional.leaky_relu(x, -0.2),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "glu": lambda x: functional.glu(torch.stack([x, x.roll(9)], -1), -1).squeeze(-1),
    "softshrink": functional.softshrink,
}
JOINTS = {"relax": KNOWN, "aot": KNOWN | OTHER}


class Formulas(nn.Module):
    """A module that applies each formula to its own input."""

    def __init__(self, formulas: dict[str, Formula]) -> None:
        super().__init__()
        self.formulas = formulas

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(f(x) for f, x in zip(self.formulas.values(), inputs, strict=True))


def special_pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pairs of special inputs and special cotangents."""
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    size = [0.0, 1.0, 2.5, 20.5, 89.0, 500.0, most**0.5 * 2, most, least, least / 4, INF]
    inputs = [*size, *(-s for s in size), NAN]
    cotangents = [1.0, 0.0, -0.0, INF, -INF, NAN, most, -most, least]
    # Repeat each pair eight times, a whole vector: eager's scalar code for a rest differs.
    pairs = list(itertools.chain(*([p] * 8 for p in itertools.product(inputs, cotangents))))
    x, g = torch.tensor(pairs, dtype=torch.float64).to(dtype).unbind(1)
    return x.contiguous(), g.contiguous()


def gradients(
    module: nn.Module, x: torch.Tensor, g: torch.Tensor, count: int
) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for _ in range(count)]
    return list(torch.autograd.grad(module(*inputs), inputs, [g] * count))


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert equal NaN, infinities and signs, and finite numbers that are equal up to rounding."""
    info = torch.finfo(expected.dtype)
    # In float64 the C library's tanh and PyTorch's vectorized tanh differ in the last digits.
    rtol = 1e-4 if expected.dtype is torch.float32 else 1e-7
    torch.testing.assert_close(
        found, expected, equal_nan=True, rtol=rtol, atol=4 * info.tiny, msg=lambda m: what + m
    )


@pytest.mark.parametrize(
    ("joint", "dtype"),
    [
        ("relax", torch.float32),
        ("aot", torch.float32),
        pytest.param("relax", torch.float64, marks=pytest.mark.slow),
        pytest.param("aot", torch.float64, marks=pytest.mark.slow),
    ],
)
def test_pointwise_formulas(joint: str, dtype: torch.dtype) -> None:
    formulas = JOINTS[joint]
    module, count = Formulas(formulas), len(formulas)
    x, g = special_pairs(dtype)
    ours = copy.deepcopy(module)
    sample = tuple(x.clone().requires_grad_() for _ in range(count))
    add_tvm_dispatch(ours, sample, options=CompileOptions(joint=joint))
    expected = gradients(module, x, g, count)
    for name, a, b in zip(formulas, gradients(ours, x, g, count), expected, strict=True):
        assert_same(a, b, f"{name}: ")
    assert dispatch_report(ours).fallbacks == {}


EXTREMES: dict[str, Formula] = {
    "max": lambda x: x.max(),
    "min": torch.min,
    "median": lambda x: x.median(),
    "nanmedian": torch.nanmedian,
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(0),
}
ROWS = (
    [1.0, 3.0, 3.0, 2.0],
    [1.0, NAN, 2.0, NAN],
    [INF, INF, 1.0, -INF],
    [0.0, -0.0, 0.0, -1.0],
)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_extremes_of_all(dtype: torch.dtype) -> None:
    module, count = Formulas(EXTREMES), len(EXTREMES)
    ours = Formulas(EXTREMES)
    sample = [torch.tensor(ROWS[0], dtype=dtype, requires_grad=True) for _ in EXTREMES]
    add_tvm_dispatch(ours, tuple(sample))
    for row, cotangent in itertools.product(ROWS, (1.0, INF, NAN, 0.0)):
        x, g = torch.tensor(row, dtype=dtype), torch.tensor(cotangent, dtype=dtype)
        expected = gradients(module, x, g, count)
        for name, a, b in zip(EXTREMES, gradients(ours, x, g, count), expected, strict=True):
            assert_same(a, b, f"{name} of {row}: ")
    assert dispatch_report(ours).fallbacks == {}


def test_extremes_of_one_element() -> None:
    formulas: dict[str, Formula] = {"amax": lambda x: x.amax(), "amin": lambda x: x.amin(0)}
    module, ours = Formulas(formulas), Formulas(formulas)
    add_tvm_dispatch(ours, tuple(torch.tensor(1.0, requires_grad=True) for _ in formulas))
    for value in (2.0, NAN, INF):
        x, g = torch.tensor(value), torch.tensor(1.0)
        expected = gradients(module, x, g, 2)
        for name, a, b in zip(formulas, gradients(ours, x, g, 2), expected, strict=True):
            assert_same(a, b, f"{name} of {value}: ")
    assert dispatch_report(ours).fallbacks == {}


class Attention(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*tensors, is_causal=len(tensors) == 3)


@pytest.mark.parametrize(
    "closed",
    [
        torch.finfo(torch.float32).min,
        pytest.param(-INF, marks=pytest.mark.slow),
        pytest.param(None, marks=pytest.mark.slow),
    ],
)
def test_attention_of_closed_rows_and_special_values(closed: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, 2, s, 8, generator=generator) for s in (5, 6, 6))
    for row, value in enumerate((NAN, INF, -INF), 1):
        q[row, 0, 2, 3] = value
        v[row + 2, 0, 2, 3] = value
    mask = torch.zeros(6, 1, 5, 6)
    mask[:, :, 1] = mask[:, :, :, 4] = closed or 0.0
    masks = () if closed is None else (mask,)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = Attention()(*leaves, *masks)
    g = torch.randn(expected.shape, generator=generator)
    # The derivative of softmax is computed by another formula than in PyTorch's fused kernel.
    ours = add_tvm_dispatch(Attention(), (*leaves, *masks), options=CompileOptions(joint="aot"))
    found = ours(*leaves, *masks)
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves, g)),
        (expected, *torch.autograd.grad(expected, leaves, g)),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, equal_nan=True)
    assert dispatch_report(ours).tvm_calls == 1


BLENDS = (
    # TVM would decompose it, and subtract one infinite part from another.
    lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.lerp(x, y, y.sigmoid()),
)


def test_blends() -> None:
    made = Made("special", BLENDS, frozenset({torch.float32}), count=2, shape=(4, 5))
    cases = cases_of_samples(made.sample_inputs("cpu", torch.float32, requires_grad=True))
    check = SpecialCheck(made.op, torch.float32, local=False, joint="auto")
    assert all(check.accepts(case) for case in cases)
    outcomes = check.group(cases)
    assert not [outcome.reason for outcome in outcomes if outcome.result == "wrong"]

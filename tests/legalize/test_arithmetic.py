"""Arithmetic that is fused into one kernel keeps PyTorch's rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.frontend.helpers import Together, assert_like_eager
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch

INF, NAN = float("inf"), float("nan")

# (x + y) - y is 0 in floating point, because y is much larger; simplified it would be x.
LOST: dict[str, Callable[..., Any]] = {
    "added and taken away": lambda x, y: (x + y) - y,
    "taken away and added": lambda x, y: (x - y) + y,
    "transposed between": lambda x, y: (x + y).t() - y.t(),
    "sliced between": lambda x, y: (x + y)[1:] - y[1:],
    "padded between": lambda x, y: functional.pad(x + y, (1, 1)) - functional.pad(y, (1, 1)),
    "chosen between": lambda x, y: torch.where(x > 0, x + y, x - y) - y,
    "joined between": lambda x, y: torch.cat([x + y, x - y]) - torch.cat([y, y]),
    "flipped between": lambda x, y: (x + y).flip(0) - y.flip(0),
    "broadcast": lambda x, y: (x[:, :1] + y[0]) - y[0],
    "summed": lambda x, y: ((x + y) - y).sum(1),
    "in a softmax": lambda x, y: ((x + y) - y).softmax(-1),
    "negated": lambda x, y: (x + y) + (-y),
    "in two steps": lambda x, y: ((x + y) + y) - (y + y),
    "products that are equal": lambda x, y: (x * x - y * y).sqrt(),
    "a product and its quotient": lambda x, y: ((x / 3e30) * (y * 1e-30)) / (y * 1e-30),
}

# Formulas that a simplifier of real numbers would replace by 0, by 1 or by x.
FOLDED: dict[str, Callable[..., Any]] = {
    "less itself times one": lambda x: (x + 1) - (x + 1) * 1.0,
    "less itself by way of another": lambda x: x.exp() - torch.stack([x.exp(), x])[0],
    "plus its negative": lambda x: x + (-x),
    "times a zero that is computed": lambda x: x * (x.detach() * 0 + 0),
    "a quotient of itself": lambda x: (x * 2) / (x * 2),
    "plus zero": lambda x: 1 / ((x * 1.0) + 0.0),
    "the sign of zero": lambda x: 1 / (-(x * 1.0)),
    "the sign of a bent zero": lambda x: 1 / functional.elu(x, -1.0),
    "the sign of a rounded quotient": lambda x: 1 / (x // 3),
    "an inverse root as a power": lambda x: x**-0.5,
    "an inverse square as a power": lambda x: x**-2,
}

# Integer formulas that overflow and wrap around.
INTEGERS: dict[str, Callable[..., Any]] = {
    "greater than before": lambda x, least: (x + 1) > x,
    "doubled and halved": lambda x, least: ((x * 2) // 2, (x * 3) - x, (x * x) >= 0),
    "less one": lambda x, least: torch.maximum(x, x - 1),
    "the least one added": lambda x, least: (x + least, (x - least).long(), (x + least) % 7),
    "the least one compared": lambda x, least: (x == least, x <= least, (x + least) == least),
    "turned": lambda x, least: (-x, x.abs(), x.abs() >= 0, -x > x),
    "widened": lambda x, least: ((x.int() + 2147483647).long() + 1, (x.long() + 2**31).int() < 0),
    "hashed": lambda x, least: ((x * 73856093) ^ (x * 19349663)) % 1000,
}


@functools.cache
def lost(dtype: torch.dtype) -> Together:
    x = torch.linspace(-1, 1, 24, dtype=dtype).reshape(4, 6) + 0.01
    y = torch.full((4, 6), 1e8 if dtype is torch.float32 else 1e18, dtype=dtype)
    same = {"products that are equal": x.clone()}
    return Together({name: (f, (x, same.get(name, y))) for name, f in LOST.items()})


@functools.cache
def folded(dtype: torch.dtype) -> Together:
    x = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1.5, -2.5, 3e38], dtype=dtype)
    return Together({name: (function, (x,)) for name, function in FOLDED.items()})


@functools.cache
def integers(dtype: torch.dtype) -> Together:
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, limits.min + 1, limits.max - 1, -1, 0, 1, 7]
    x = torch.tensor(values * 3, dtype=dtype)
    return Together(
        {n: (functools.partial(f, least=limits.min), (x,)) for n, f in INTEGERS.items()}
    )


# The rules are the same for both.
FLOATS = but_slow([torch.float32, torch.float64], torch.float64)


@pytest.mark.parametrize("dtype", but_slow([torch.int32, torch.int64], torch.int32), ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_around(name: str, dtype: torch.dtype) -> None:
    integers(dtype).assert_like_eager(name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", LOST)
def test_nothing_is_rearranged(name: str, dtype: torch.dtype) -> None:
    lost(dtype).assert_like_eager(name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FOLDED)
def test_nothing_is_folded(name: str, dtype: torch.dtype) -> None:
    folded(dtype).assert_like_eager(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_sign_of_a_zero_is_kept(dtype: torch.dtype) -> None:
    """Compare bits, because -0.0 == 0.0."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype)

    def signs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.copysign(torch.ones_like(x), y) for y in (-x, x * 1.0, x * -1.0, x - 0))

    assert_like_eager(signs, x)


def test_a_product_with_an_integer_zero_is_compiled() -> None:
    """Check a product with the integer 0, whose bits TVM can reinterpret as a pointer only."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.baddbmm(x, y, y, beta=0)

    x, y = torch.randint(9, (2, 3, 3)), torch.randint(9, (2, 3, 3))
    module = add_tvm_dispatch(Scaled().eval(), (x, y))
    assert torch.equal(module(x, y), Scaled()(x, y))


def test_integers_of_more_bits_than_their_tensor_has() -> None:
    """Check that a number that does not fit keeps its lowest bits, as in PyTorch."""
    functions: dict[str, Callable[..., Any]] = {
        "and": lambda x: x & (2**40 - 3),
        "or": lambda x: x | (2**31 + 1),
        "xor": lambda x: x ^ -(2**40),
        "added": lambda x: x + torch.tensor(2**40 + 5),
        "multiplied": lambda x: x * torch.tensor(-(2**33) - 3),
        "compared": lambda x: x > torch.tensor(2**40),
        "chosen": lambda x: torch.where(x > 2, x, torch.tensor(2**35 + 1)),
    }
    x = torch.arange(-3, 3, dtype=torch.int32)

    def all_of_them(x: torch.Tensor) -> tuple[Any, ...]:
        return tuple(function(x) for function in functions.values())

    assert_like_eager(all_of_them, x)

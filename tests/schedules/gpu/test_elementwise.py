"""Emulated element-wise kernels and transposes: tails, several elements a thread, layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from tests.schedules.gpu.emulator import run_all, run_each
from tests.thinned import but_slow

_FULL = 132 * 8 * 256
# A few rounding errors of numbers around 1.
NEAR = {"rtol": 1e-6, "atol": 1e-6}


def test_chains_of_any_length() -> None:
    sizes = (1, 255, 256, 257, 1000, 2 * _FULL, 5 * _FULL + 1)
    cases = [(torch.randn(size), torch.randn(size)) for size in sizes]
    found = run_each(lambda a, b: op.nn.gelu(op.multiply(op.add(a, b), a)), *cases)
    for (x, y), (result,) in zip(cases, found, strict=True):
        exact = functional.gelu((x.double() + y) * x)
        torch.testing.assert_close(result.double(), exact, rtol=2e-6, atol=2e-6)


def test_broadcasts_of_all_axes() -> None:
    x, row, column = torch.randn(3, 37, 65), torch.randn(65), torch.randn(37, 1)

    def graph(v: relax.Expr, r: relax.Expr, c: relax.Expr) -> list[relax.Expr]:
        total = op.add(op.multiply(v, r), c)
        return [op.tanh(total), op.multiply(r, c), op.negative(c)]

    results = run_all(graph, x, row, column)
    exact = (x.double() * row + column).tanh(), row.double() * column, -column.double()
    for result, wanted in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), wanted, **NEAR)


def test_layouts_move_every_element() -> None:
    x, y = torch.randn(3, 17, 5, 20), torch.randn(129, 257)

    def graph(v: relax.Expr, w: relax.Expr) -> list[relax.Expr]:
        orders = [(0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 3, 2)]
        moved = [op.permute_dims(op.add(v, v), order) for order in orders]
        sliced = op.strided_slice(w, [0, 1], [5, 1], [129, 257], [3, 2])
        joined = op.concat([op.flip(w, 1), w, op.flip(w, 0)], 0)
        return [*moved, op.permute_dims(w), sliced, joined]

    results = run_all(graph, x, y)
    exact = [(2 * x).permute(order) for order in [(0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 3, 2)]]
    exact += [y.T, y[5::3, 1::2], torch.cat([y.flip(1), y, y.flip(0)])]
    for result, wanted in zip(results, exact, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize(
    "dtype",
    but_slow(
        [torch.float32, torch.bfloat16, torch.float16, torch.int64], torch.float16, torch.int64
    ),
)
def test_transposes_in_tiles(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 3, 45, 20).mul(9).to(dtype), torch.randn(70, 33).mul(9).to(dtype)

    def graph(v: relax.Expr, w: relax.Expr) -> list[relax.Expr]:
        name = str(dtype).removeprefix("torch.")
        heads = op.permute_dims(op.reshape(v, [6, 45, 20]), [0, 2, 1])
        scaled = op.multiply(op.add(heads, heads), relax.const(3, name))
        far = op.permute_dims(op.reshape(v, [2, 135, 20]), [2, 0, 1])
        both = op.add(op.permute_dims(w), op.reshape(w, [33, 70]))
        return [scaled, far, both, op.greater(op.permute_dims(w), relax.const(1, name))]

    results = run_all(graph, x, y)
    heads = x.reshape(6, 45, 20).mT
    exact = [(heads + heads) * 3, x.reshape(2, 135, 20).permute(2, 0, 1)]
    exact += [y.T + y.reshape(33, 70), y.T > 1]
    for result, wanted in zip(results, exact, strict=True):
        assert torch.equal(result, wanted)


def test_truth_values_and_integers() -> None:
    x, keep, n = torch.randn(37, 65), torch.rand(37, 65) > 0.5, torch.randint(-9, 9, (37, 65))

    def graph(v: relax.Expr, m: relax.Expr, k: relax.Expr) -> list[relax.Expr]:
        both = op.logical_and(m, op.greater(v, relax.const(0.0, "float32")))
        return [op.where(m, v, op.negative(v)), both, op.add(op.multiply(k, k), k)]

    results = run_all(graph, x, keep, n)
    for result, wanted in zip(results, [x.where(keep, -x), keep & (x > 0), n * n + n], strict=True):
        assert torch.equal(result, wanted)


def test_halves_round_after_every_operation() -> None:
    cases = [torch.randn(2, 37, 65).to(dtype).unbind() for dtype in (torch.bfloat16, torch.float16)]

    def graph(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.add(op.multiply(op.add(a, b), a), op.subtract(a, b))

    for (x, y), (result,) in zip(cases, run_each(graph, *cases), strict=True):
        assert torch.equal(result, (x + y) * x + (x - y))


@pytest.mark.parametrize(
    "dtype", but_slow([torch.bfloat16, torch.float32, torch.int64], torch.float32)
)
def test_neighbours_move_as_vectors(dtype: torch.dtype) -> None:
    # Large enough that a thread computes several elements.
    x = torch.randint(-9, 9, (1100, 768)).to(dtype)
    row, column = torch.randint(-9, 9, (768,)).to(dtype), torch.randint(-9, 9, (1100, 1)).to(dtype)
    keep = torch.rand(1100, 768) > 0.5
    name = str(dtype).removeprefix("torch.")

    def graph(v: relax.Expr, r: relax.Expr, c: relax.Expr, m: relax.Expr) -> list[relax.Expr]:
        total = op.add(op.multiply(v, r), c)
        moved = op.concat([op.strided_slice(v, [1], [3], [768]), op.negative(v)], 1)
        return [
            op.where(m, total, op.negative(v)),
            moved,
            op.full((1100, 768), relax.const(1, name)),
        ]

    results = run_all(graph, x, row, column, keep)
    exact = [(x * row + column).where(keep, -x), torch.cat([x[:, 3:], -x], 1), torch.ones_like(x)]
    for result, wanted in zip(results, exact, strict=True):
        assert torch.equal(result, wanted)


def test_constants_of_float64_keep_their_bits() -> None:
    numbers = (1e-30, -3.3e-9, 2.2204460492503131e-16, 1e300, 0.1, math.pi)
    x = torch.randn(77, dtype=torch.float64)
    found = run_all(lambda v: [op.multiply(v, relax.const(n, "float64")) for n in numbers], x)
    for number, result in zip(numbers, found, strict=True):
        assert torch.equal(result, x * number)


def test_exponentials_are_those_of_the_gpu() -> None:
    edges = torch.tensor([0.0, -0.0, 1e-30, 88.7, 89.0, -88.0, -103.5, -200.0, math.inf, -math.inf])
    x = torch.cat([edges, torch.tensor([math.nan]), torch.linspace(-12, 12, 1001)])
    names = ("exp", "tanh", "sigmoid")
    found = run_all(lambda v: [getattr(op, name)(v) for name in names], x)
    for name, result in zip(names, found, strict=True):
        exact = getattr(torch, name)(x.double()).float().double()
        # The least denormal: e^x overflows before 1 / (1 + e^x) vanishes, as in PyTorch's kernel.
        torch.testing.assert_close(
            result.double(), exact, rtol=4e-7, atol=2e-45, equal_nan=True, msg=name
        )

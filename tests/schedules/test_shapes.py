"""Kernels for shapes that vectors do not divide, for empty shapes, and for scalars."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from tests.legalize.compiled import run, run_all

SHAPES = [(14, 768), (7, 13), (128, 50), (3, 5, 77), (1, 1), (5,), (1000, 3), (2, 300, 31), ()]


def test_elementwise_chain() -> None:
    cases = [(torch.randn(shape), torch.randn(shape)) for shape in SHAPES]

    def graph(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.nn.gelu(op.multiply(op.add(a, b), a))

    for (x, y), result in zip(cases, run_all(*((graph, *c) for c in cases)), strict=True):
        exact = functional.gelu((x.double() + y) * x)
        torch.testing.assert_close(result.double(), exact, rtol=2e-6, atol=2e-6)


def test_bias_and_row_chain() -> None:
    cases = [(torch.randn(shape), torch.randn(shape[-1:])) for shape in SHAPES if shape]

    def graph(v: relax.Expr, c: relax.Expr) -> relax.Expr:
        s = op.nn.softmax(op.add(op.multiply(v, relax.const(0.5, "float32")), c), -1)
        return op.add(op.multiply(s, op.sum(s, -1, keepdims=True)), v)

    for (x, b), result in zip(cases, run_all(*((graph, *c) for c in cases)), strict=True):
        s = (x.double() * 0.5 + b).softmax(-1)
        exact = s * s.sum(-1, keepdim=True) + x
        torch.testing.assert_close(result.double(), exact, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_column_and_row_sums_of_a_product(axis: int) -> None:
    shapes = [(1024, 96), (33, 50), (4, 129, 31), (5000, 3), (3, 5000)]
    cases = [(torch.randn(shape), torch.randn(shape)) for shape in shapes]

    def graph(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.sum(op.multiply(a, op.tanh(b)), axis)

    for (x, y), result in zip(cases, run_all(*((graph, *c) for c in cases)), strict=True):
        exact = (x.double() * y.double().tanh()).sum(axis)
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)


def test_permute_with_elementwise() -> None:
    orders = [(0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 3, 2), (1, 0, 2, 3)]
    x = torch.randn(3, 17, 5, 20)
    results = run_all(
        *((lambda v, o=order: op.tanh(op.permute_dims(op.add(v, v), o)), x) for order in orders)
    )
    for order, result in zip(orders, results, strict=True):
        torch.testing.assert_close(result, torch.tanh(x.permute(order) * 2), rtol=1e-6, atol=1e-6)


def test_large_transpose() -> None:
    x = torch.randn(513, 770)
    torch.testing.assert_close(run(op.permute_dims, x), x.T.contiguous(), rtol=0, atol=0)


def test_empty() -> None:
    for x in (torch.randn(0), torch.randn(0, 5), torch.randn(0, 3, 5)):
        calls = (
            (op.tanh, x),
            (lambda v: op.sum(v, 0), x),
            (lambda v: op.mean(v, 0), x),
            (op.sum, x),
        )
        expected = [x, x.sum(0), x.mean(0), x.sum()]
        torch.testing.assert_close(run_all(*calls), expected, equal_nan=True)


def test_masks_of_truth_values() -> None:
    x, keep = torch.randn(37, 65), torch.rand(37, 65) > 0.5
    scale = relax.const(2.0, "float32")
    result = run(lambda v, m: op.multiply(op.multiply(v, op.astype(m, "float32")), scale), x, keep)
    torch.testing.assert_close(result, x * keep * 2)
    result = run(lambda v, m: op.where(m, v, op.negative(v)), x, keep)
    torch.testing.assert_close(result, torch.where(keep, x, -x))


def test_bfloat16_rounds_after_every_operation() -> None:
    x, y = torch.randn(37, 65).bfloat16(), torch.randn(37, 65).bfloat16()
    result = run(lambda a, b: op.add(op.multiply(op.add(a, b), a), op.subtract(a, b)), x, y)
    torch.testing.assert_close(result, (x + y) * x + (x - y), rtol=0, atol=0)


def test_a_choice_reads_an_intermediate_result_of_bfloat16() -> None:
    x, numbers = torch.randn(4, 3).bfloat16(), torch.arange(6).reshape(2, 3).int()
    result = run(lambda a, b: op.concat([a, op.astype(b, "bfloat16")], 0), x, numbers)
    torch.testing.assert_close(result, torch.cat([x, numbers.bfloat16()]), rtol=0, atol=0)


def test_gather_feeds_a_normalisation() -> None:
    table, at = torch.randn(50, 48), torch.randint(0, 50, (3, 7))
    w = torch.ones(48)

    def graph(t: relax.Expr, i: relax.Expr, g: relax.Expr) -> relax.Expr:
        return op.nn.layer_norm(op.take(t, i, 0), g, g, -1, 1e-5)

    exact = functional.layer_norm(table[at].double(), (48,)) + 1
    torch.testing.assert_close(run(graph, table, at, w).double(), exact, rtol=5e-6, atol=5e-6)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 150),
    axis=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_softmax_and_sum_of_any_extent(rows: int, columns: int, axis: int, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    result = run(lambda v: op.sum(op.nn.softmax(v, axis), axis), x)
    torch.testing.assert_close(result, torch.ones_like(result), rtol=2e-6, atol=0)

"""CombineParallelBatchMatmul: matrix products with a common left operand become one product."""

# ruff: noqa: ANN201, ANN202, F841  (the Relax functions here are TVM script)

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import (
    apply_pass,
    assert_becomes,
    build_main,
    compile_and_run,
    operators,
)
from tvmbridge.passes.relax.combine_parallel_batch_matmul import CombineParallelBatchMatmul
from tvmbridge.passes.relax.parallel_products import ParallelProducts

op = relax.op
Formula = Callable[..., relax.Expr | Sequence[relax.Expr]]


@I.ir_module
class Before:
    """Grouped queries: the key is narrower, and each linear layer flattens the input separately."""

    @R.function
    def main(
        x: R.Tensor((2, 3, 4), "float64"),
        wq: R.Tensor((6, 4), "float64"),
        wk: R.Tensor((2, 4), "float64"),
        bq: R.Tensor((6,), "float64"),
    ):
        with R.dataflow():
            rows = R.reshape(x, R.shape([6, 4]))
            wq_t = R.permute_dims(wq, axes=[1, 0])
            q = R.matmul(rows, wq_t)
            q_b = R.add(q, bq)
            wk_t = R.permute_dims(wk)
            k = R.matmul(x, wk_t)
            gv = (q_b, k)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3, 4), "float64"),
        wq: R.Tensor((6, 4), "float64"),
        wk: R.Tensor((2, 4), "float64"),
        bq: R.Tensor((6,), "float64"),
    ):
        with R.dataflow():
            rows = R.reshape(x, R.shape([6, 4]))
            wq_t = R.permute_dims(wq, axes=[1, 0])
            w = R.concat((wq, wk), axis=0)
            w_t = R.permute_dims(w, axes=[1, 0])
            y = R.matmul(rows, w_t)
            q = R.strided_slice(y, (1,), (0,), (6,))
            q_b = R.add(q, bq)
            wk_t = R.permute_dims(wk)
            part = R.strided_slice(y, (1,), (6,), (8,))
            k = R.reshape(part, R.shape([2, 3, 2]))
            gv = (q_b, k)
            R.output(gv)
        return gv


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def products(mod: tvm.IRModule) -> int:
    return operators(mod).count("relax.matmul")


def check(
    inputs: Sequence[torch.Tensor], formula: Formula, count: int, **options: object
) -> tuple[tvm.IRModule, list[str]]:
    """Assert that the pass leaves ``count`` products and equal values.

    Returns:
        The rewritten module, and the reasons of declined products.
    """
    mod = build_main(inputs, formula)
    after, report = apply_pass(CombineParallelBatchMatmul(**options), mod)  # type: ignore[arg-type]
    assert products(after) == count, after.script()
    for ours, theirs in zip(
        compile_and_run(after, *inputs), compile_and_run(mod, *inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    return after, report.declined


def test_products_become_one() -> None:
    assert_becomes(CombineParallelBatchMatmul(), Before, Expected, 2)


def test_agrees_with_pytorch_in_float64() -> None:
    x, wq, wk, bq = tensors((2, 3, 4), (6, 4), (2, 4), (6,))
    q, k = compile_and_run(CombineParallelBatchMatmul()(Before), x, wq, wk, bq)
    torch.testing.assert_close(q, (x @ wq.T + bq).view(6, 6), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(k, x @ wk.T, rtol=1e-13, atol=1e-13)


def test_declines_with_the_reason() -> None:
    @I.ir_module
    class Declined:
        @R.function
        def main(
            x: R.Tensor(("n", 4), "float32"),
            a: R.Tensor((4, 3), "float32"),
            b: R.Tensor((4, 2), "float32"),
            v: R.Tensor((4,), "float32"),
        ):
            with R.dataflow():
                y = R.matmul(x, a)
                z = R.matmul(x, b)
                s = R.matmul(v, a)
                t = R.matmul(v, b)
                gv = (y, z, s, t)
                R.output(gv)
            return gv

    after, report = apply_pass(CombineParallelBatchMatmul(), Declined)
    tvm.ir.assert_structural_equal(after, Declined)
    reason = "not a product of matrices of static shape"
    assert report.declined == [f"product with {name}: {reason}" for name in "abab"]


def test_who_may_be_concatenated_is_asked() -> None:
    def formula(x: relax.Var, a: relax.Var, b: relax.Var, c: relax.Var) -> list[relax.Expr]:
        computed = relax.BlockBuilder.current().emit(op.multiply(a, b))
        return [op.matmul(x, w) for w in (a, b, c, computed)]

    inputs = tensors((3, 4), (4, 2), (4, 2), (4, 2))
    refusals = {"x2": "it is tied"}
    _, declined = check(inputs, formula, 3, weight_refusal=refusals.get)
    assert declined == [
        "product with x2: it is tied",
        "product with lv: its right operand is computed at each call",
    ]
    asked: list[ParallelProducts] = []

    def refuse(group: ParallelProducts) -> str:
        asked.append(group)
        return "slower"

    _, declined = check(inputs, formula, 4, weight_refusal=refusals.get, group_refusal=refuse)
    assert "product with x1, product with x3: slower" in declined
    assert asked == [ParallelProducts(("x1", "x3"), (3, 4), (), (2, 2), False, "float64")]
    _, declined = check(
        inputs[:3], lambda x, a, b: [op.matmul(x, a), op.matmul(x, b)], 2, min_products=3
    )
    assert declined == ["product with x1, product with x2: fewer than 3 such products"]


def test_a_right_operand_that_comes_later_is_declined() -> None:
    def formula(x: relax.Var, a: relax.Var, b: relax.Var) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        y = builder.emit(op.matmul(x, a))
        return op.matmul(x, builder.emit(op.add(b, y)))

    _, declined = check(tensors((4, 4), (4, 4), (4, 4)), formula, 2)
    assert declined[0].endswith("computed after the first of the products")


LAYOUTS: list[tuple[str, list[tuple[int, ...]], Formula, int]] = [
    (
        "batched",
        [(2, 3, 4), (2, 4, 5), (2, 4, 1)],
        lambda x, a, b: [op.matmul(x, a), op.matmul(x, b)],
        1,
    ),
    (
        "batched and transposed",
        [(2, 3, 4), (2, 5, 4), (2, 1, 4)],
        lambda x, a, b: [
            op.matmul(x, op.permute_dims(a, [0, 2, 1])),
            op.matmul(x, op.permute_dims(b, [0, 2, 1])),
        ],
        1,
    ),
    (
        "a batch that is broadcast",
        [(3, 4), (2, 4, 5), (2, 4, 2)],
        lambda x, a, b: [op.matmul(x, a), op.matmul(x, b)],
        1,
    ),
    (
        "different batches",
        [(1, 3, 4), (2, 4, 5), (1, 4, 2)],
        lambda x, a, b: [op.matmul(x, a), op.matmul(x, b)],
        2,
    ),
    (
        "different forms",
        [(3, 4), (4, 5), (5, 4)],
        lambda x, a, b: [op.matmul(x, a), op.matmul(x, op.permute_dims(b))],
        2,
    ),
    (
        "two groups",
        [(3, 4), (3, 4), (4, 5), (4, 2)],
        lambda x, z, a, b: [op.matmul(v, w) for v in (x, z) for w in (a, b)],
        2,
    ),
    (
        "a weight twice",
        [(3, 4), (4, 5), (4, 2)],
        lambda x, a, b: [op.matmul(x, a), op.matmul(x, b), op.matmul(x, a)],
        1,
    ),
    (
        "views of the left operand",
        [(4, 2, 3), (4, 5), (4, 2)],
        lambda x, a, b: [
            op.matmul(op.reshape(op.permute_dims(x, [2, 1, 0]), (6, 4)), a),
            op.matmul(op.reshape(op.permute_dims(x, [2, 1, 0]), (6, 4)), b),
        ],
        1,
    ),
    (
        "a view with other rows",
        [(4, 6), (6, 5), (6, 2)],
        lambda x, a, b: [
            op.matmul(x, a),
            op.matmul(op.reshape(op.permute_dims(x), (4, 6)), b),
        ],
        2,
    ),
    (
        "transposes undone",
        [(3, 4), (4, 5), (4, 2)],
        lambda x, a, b: [
            op.matmul(op.permute_dims(op.permute_dims(x)), op.permute_dims(op.permute_dims(a))),
            op.matmul(x, b),
        ],
        1,
    ),
]


@pytest.mark.parametrize(
    ("shapes", "formula", "count"), [c[1:] for c in LAYOUTS], ids=[c[0] for c in LAYOUTS]
)
def test_layouts(shapes: list[tuple[int, ...]], formula: Formula, count: int) -> None:
    check(tensors(*shapes), formula, count)


def test_biases_can_be_joined() -> None:
    def formula(x: relax.Var, *rest: relax.Var) -> list[relax.Expr]:
        a, b, p, q = rest
        return [op.add(op.matmul(x, a), p), op.add(q, op.matmul(x, b))]

    inputs = tensors((3, 4), (4, 5), (4, 2), (5,), (2,))
    after, declined = check(inputs, formula, 1, join_biases=True)
    assert (operators(after).count("relax.add"), declined) == (1, [])
    after, _ = check(inputs, formula, 1)
    assert operators(after).count("relax.add") == 2


@pytest.mark.parametrize("row", [(), (1,), (3, 5)])
def test_what_is_no_row_for_each_product_stays_behind_it(row: tuple[int, ...]) -> None:
    def formula(x: relax.Var, a: relax.Var, b: relax.Var, p: relax.Var) -> list[relax.Expr]:
        return [op.add(op.matmul(x, a), p), op.add(op.matmul(x, b), p)]

    after, declined = check(tensors((3, 4), (4, 5), (4, 5), row), formula, 1, join_biases=True)
    assert operators(after).count("relax.add") == 2
    assert declined == ["biases: not every product has one row added to it"]

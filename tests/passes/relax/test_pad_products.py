"""PadProducts: large products of unaligned rows are padded, with the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
    operators,
)
from tvmbridge.passes.relax import pad_products
from tvmbridge.passes.relax.pad_products import PadProducts

Product = Callable[[relax.Expr, relax.Expr], relax.Expr]


def _plain(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return op.matmul(x, w)


def _of_transposed(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return op.matmul(x, relax.BlockBuilder.current().emit(op.permute_dims(w, [1, 0])))


def _transposed(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return op.matmul(relax.BlockBuilder.current().emit(op.permute_dims(x, [1, 0])), w)


def _both(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    emit = relax.BlockBuilder.current().emit
    return op.matmul(emit(op.permute_dims(x, [1, 0])), emit(op.permute_dims(w, [1, 0])))


FORMS: dict[str, tuple[Product, tuple[int, int], tuple[int, int]]] = {
    "logits": (_of_transposed, (16, 8), (11, 8)),
    "gradient of hidden states": (_plain, (16, 11), (11, 8)),
    "gradient of weights": (_transposed, (16, 11), (16, 8)),
    "odd depth": (_of_transposed, (16, 11), (8, 11)),
    "odd everywhere": (_both, (11, 9), (7, 11)),
}


@pytest.fixture(autouse=True)
def _always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad_products, "_MARGIN", 0.0)


@pytest.mark.parametrize("name", FORMS)
def test_the_values_are_the_same(name: str) -> None:
    product, left, right = FORMS[name]
    # Small integers: sums are exact in any order.
    x, w = (torch.randint(-3, 4, shape).half() for shape in (left, right))
    mod = build_main([x, w], product)
    after, report = apply_pass(PadProducts(), mod)
    assert report.rewrites == 1
    assert "relax.nn.pad" in operators(after)
    (found,), (kept,) = compile_and_run(after, x, w), compile_and_run(mod, x, w)
    assert torch.equal(found, kept)


@pytest.mark.parametrize(
    ("product", "left", "right"),
    [
        (_of_transposed, (11, 8), (16, 8)),  # only the number of rows is odd
        (_transposed, (11, 16), (11, 8)),  # only the depth, which no row has
    ],
)
def test_aligned_rows_stay(product: Product, left: tuple[int, int], right: tuple[int, int]) -> None:
    mod = build_main([torch.zeros(left).half(), torch.zeros(right).half()], product)
    assert_changes_nothing(PadProducts(), mod)


def test_float32_stays() -> None:
    mod = build_main([torch.zeros(16, 8), torch.zeros(11, 8)], _of_transposed)
    assert_changes_nothing(PadProducts(), mod)


def test_what_copies_would_cost_more_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad_products, "_MARGIN", 1.0)
    mod = build_main([torch.zeros(16, 8).half(), torch.zeros(11, 8).half()], _of_transposed)
    assert_changes_nothing(PadProducts(), mod)

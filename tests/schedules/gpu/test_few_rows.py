"""Emulated matrix products of few rows: their results, and the products that become them."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import apply_pass, assert_changes_nothing, build_main, operators
from tests.schedules.gpu.emulator import run_module
from tvmbridge.passes.relax import few_row_products
from tvmbridge.passes.relax.few_row_products import FewRowProducts


def _product(x: torch.Tensor, w: torch.Tensor) -> tvm.IRModule:
    return build_main([x, w], lambda a, b: op.matmul(a, op.permute_dims(b, [1, 0])))


SHAPES = [
    (1, 770, 128),
    (5, 64, 1028),
    (8, 61, 3072),
    (14, 96, 768),
    (17, 130, 772),
    (32, 64, 1024),
]


def test_results_are_exact_to_rounding() -> None:
    """Check products of several numbers of rows, columns and terms, compiled as one module."""
    pairs = [(torch.randn(rows, k), torch.randn(columns, k)) for rows, columns, k in SHAPES]
    given = [tensor for pair in pairs for tensor in pair]

    def graph(*variables: relax.Expr) -> list[relax.Expr]:
        both = zip(variables[::2], variables[1::2], strict=True)
        return [op.matmul(a, op.permute_dims(b, [1, 0])) for a, b in both]

    mod, report = apply_pass(FewRowProducts(), build_main(given, graph))
    assert report.rewrites == len(SHAPES)
    for (x, w), found in zip(pairs, run_module(mod, *given), strict=True):
        exact = x.double() @ w.double().T
        assert (found.double() - exact).norm() < 2e-7 * exact.norm(), tuple(exact.shape)


def test_what_is_fused_behind_reads_the_product() -> None:
    x, w, bias = torch.randn(14, 768), torch.randn(96, 768), torch.randn(96)

    def graph(a: relax.Expr, b: relax.Expr, c: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.add(op.matmul(a, op.permute_dims(b, [1, 0])), c))

    mod, report = apply_pass(FewRowProducts(), build_main([x, w, bias], graph))
    assert report.rewrites == 1
    assert "relax.matmul" not in operators(mod)
    (found,) = run_module(mod, x, w, bias)
    exact = (x.double() @ w.double().T + bias).relu()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_other_products_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(14, 768)
    assert_changes_nothing(FewRowProducts(), _product(torch.randn(33, 768), torch.randn(96, 768)))
    assert_changes_nothing(FewRowProducts(), _product(torch.randn(3, 770), torch.randn(96, 770)))
    assert_changes_nothing(FewRowProducts(), _product(x.double(), torch.randn(96, 768).double()))
    assert_changes_nothing(FewRowProducts(), _product(x, torch.randn(8, 768)))
    straight = build_main([x, torch.randn(768, 96)], op.matmul)
    assert_changes_nothing(FewRowProducts(), straight)
    monkeypatch.setattr(few_row_products, "reduced_precisions", lambda: (("CUDA", "tf32"),))
    assert_changes_nothing(FewRowProducts(), _product(x, torch.randn(96, 768)))

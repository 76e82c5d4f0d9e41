"""Products of a transposed copy: chosen where they are measured to be faster, and as exact."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, compile_and_run
from tvmbridge.kernels import transposed
from tvmbridge.passes.relax import dispatch_kernels
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels

# ruff: noqa: ANN201, F841  (the Relax functions here are TVM script)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")

Copy = Callable[[torch.Tensor], torch.Tensor]


@I.ir_module
class Gradient:
    @R.function
    def main(ct: R.Tensor((2, 3, 5), "float32"), x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            flat = R.reshape(ct, R.shape([6, 5]))
            turned = R.permute_dims(flat, axes=[1, 0])
            rows = R.reshape(x, R.shape([6, 4]))
            gv = R.matmul(turned, rows)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(ct: R.Tensor((2, 3, 5), "float32"), x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            flat = R.reshape(ct, R.shape([6, 5]))
            turned = R.permute_dims(flat, axes=[1, 0])
            rows = R.reshape(x, R.shape([6, 4]))
            matrix = R.reshape(ct, R.shape([6, 5]))
            copy = R.permute_dims(matrix)
            gv = R.call_pure_packed(
                "tvmbridge.onednn_matmul",
                R.str('{"views": [null, [[6, 4], [4, 1]]], "result": [5, 4]}'),
                copy,
                x,
                ty_args=(R.Tensor((5, 4), "float32"),),
            )
            R.output(gv)
        return gv


def test_the_left_operand_is_transposed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(*arguments: object) -> bool:
        asked.append(arguments[:3])
        return True

    monkeypatch.setattr(dispatch_kernels, "faster_transposed", answer)
    after, _ = apply_pass(DispatchKernels(measure=True), Gradient)
    assert asked == [(6, 5, ((2, 3, 4), ((6, 4), (4, 1))))]
    tvm.ir.assert_structural_equal(after, Expected)
    ct, x = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    exact = ct.double().view(6, 5).T @ x.double().view(6, 4)
    (found,) = compile_and_run(after, ct, x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_nothing_is_asked_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_kernels, "faster_transposed", None)
    after, _ = apply_pass(DispatchKernels(), Gradient)
    assert "tvmbridge.onednn_matmul" not in after.script()


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (lambda x: x.t().contiguous().add(1e-3), False),
        (lambda x: (time.sleep(0.05), x.t().contiguous())[1], False),
    ],
    ids=["wrong", "slow"],
)
def test_a_copy_that_is_wrong_or_slow_is_not_chosen(
    copy: Copy, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "0")
    monkeypatch.setattr(transposed, "choice", lambda question, among, measure: measure())
    right = ((256, 512), None)
    assert transposed.faster_transposed(256, 512, right, lambda *_: copy) is expected


def test_small_products_are_not_measured() -> None:
    assert not transposed.faster_transposed(8, 16, ((8, 4), None), None)  # type: ignore[arg-type]

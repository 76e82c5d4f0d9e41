"""Matrix products in generated loops: chosen if measured to be faster, and as accurate as MKL."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, compile_and_run
from tvmbridge.kernels import product_loops
from tvmbridge.kernels.matmul import Operand
from tvmbridge.kernels.product_form import Form, form_of
from tvmbridge.kernels.product_loops import LIBRARY, MULTIPLIED, TRANSPOSED, Loops
from tvmbridge.passes.relax import dispatch_kernels
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels
from tvmbridge.schedules.alone import multiplication, this_machine, transposition
from tvmbridge.schedules.products import product

# ruff: noqa: ANN201, F841  (the Relax functions here are TVM script)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")

FORM = Form(40, 64, 6, left_transposed=True)


@I.ir_module
class Gradient:
    @R.function
    def main(ct: R.Tensor((2, 3, 40), "float32"), x: R.Tensor((2, 3, 64), "float32")):
        with R.dataflow():
            flat = R.reshape(ct, R.shape([6, 40]))
            turned = R.permute_dims(flat, axes=[1, 0])
            rows = R.reshape(x, R.shape([6, 64]))
            gv = R.matmul(turned, rows)
            R.output(gv)
        return gv


@I.ir_module
class OfTransposedCopy:
    @R.function
    def main(ct: R.Tensor((2, 3, 40), "float32"), x: R.Tensor((2, 3, 64), "float32")):
        with R.dataflow():
            flat = R.reshape(ct, R.shape([6, 40]))
            turned = R.permute_dims(flat, axes=[1, 0])
            rows = R.reshape(x, R.shape([6, 64]))
            matrix = R.reshape(ct, R.shape([6, 40]))
            copy = R.permute_dims(matrix)
            gv = R.call_pure_packed(
                "tvmbridge.onednn_matmul",
                R.str('{"views": [null, [[6, 64], [64, 1]]], "result": [40, 64]}'),
                copy,
                x,
                ty_args=(R.Tensor((40, 64), "float32"),),
            )
            R.output(gv)
        return gv


def _dispatched(monkeypatch: pytest.MonkeyPatch, way: str) -> tvm.IRModule:
    asked = []

    def answer(form: Form, loops: Loops, *, multiply: bool) -> str:
        asked.append((form, multiply))
        return way

    monkeypatch.setattr(dispatch_kernels, "fastest", answer)
    after, _ = apply_pass(DispatchKernels(measure=True), Gradient)
    assert asked == [(FORM, True)]
    ct, x = torch.randn(2, 3, 40), torch.randn(2, 3, 64)
    (found,) = compile_and_run(after, ct, x)
    exact = ct.double().view(6, 40).T @ x.double().view(6, 64)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    return after


def test_the_left_operand_is_transposed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    after = _dispatched(monkeypatch, TRANSPOSED)
    tvm.ir.assert_structural_equal(after, OfTransposedCopy)


def test_loops_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    after = _dispatched(monkeypatch, MULTIPLIED)
    tvm.ir.assert_structural_equal(after["product"], product(FORM, this_machine()))
    assert "tvmbridge." not in after["main"].script()


def test_nothing_is_asked_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_kernels, "fastest", None)
    after, _ = apply_pass(DispatchKernels(), Gradient)
    assert "tvmbridge.onednn_matmul" not in after.script()


def _slow(form: Form) -> Callable[..., None]:
    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        time.sleep(0.05)
        out.copy_(a.t() @ b)

    return multiply


def _wrong(form: Form) -> Callable[..., None]:
    return lambda a, b, out: out.copy_(b[0].expand(out.shape))


@pytest.fixture(autouse=True)
def _no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test depend on the rates that others measured."""
    monkeypatch.setattr(product_loops, "_rates", {})


@pytest.mark.parametrize("make", [_slow, _wrong, lambda form: None], ids=["slow", "wrong", "none"])
def test_loops_that_are_wrong_or_slow_are_not_chosen(
    make: Callable[[Form], Callable[..., None] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_loops, "choice", lambda question, among, measure: measure())
    copies: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.t().contiguous().add(1e-3),
        lambda x: (time.sleep(0.05), x.t().contiguous())[1],
    ]
    form = Form(512, 256, 256, left_transposed=True)
    for copy in copies:
        loops = Loops(lambda *_, copy=copy: copy, make)  # type: ignore[misc]
        assert product_loops.fastest(form, loops) == LIBRARY


@pytest.mark.parametrize("batch", [None, 2, 70])
def test_right_loops_are_measured(batch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_loops, "choice", lambda question, among, measure: measure())
    monkeypatch.setattr(product_loops, "race", lambda candidates: [*range(len(candidates), 0, -1)])
    form = Form(128, 64, 256, batch=batch)
    assert product_loops.fastest(form, Loops(transposition, multiplication)) == MULTIPLIED


@pytest.mark.parametrize(("rate", "compiled"), [(1.0, False), (1e30, True)])
def test_loops_are_compiled_if_the_library_is_slow(
    rate: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_loops, "choice", lambda question, among, measure: measure())
    made: list[Form] = []
    threads = torch.get_num_threads()
    monkeypatch.setattr(product_loops, "_rates", {threads: [rate] * 3, threads + 1: []})
    form = Form(128, 64, 256)
    assert product_loops.fastest(form, Loops(transposition, made.append)) == LIBRARY
    assert made == [form] * compiled


def test_rates_of_large_products_alone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_loops, "choice", lambda question, among, measure: measure())
    monkeypatch.setattr(product_loops, "race", lambda candidates: [0.5] * len(candidates))
    loops = Loops(transposition, multiplication)
    for form in (Form(128, 64, 256), Form(256, 256, 256)):
        product_loops.fastest(form, loops)
    assert product_loops._rates == {torch.get_num_threads(): [2 * 256**3]}


def test_small_products_are_not_measured() -> None:
    loops = Loops(transposition, multiplication)
    assert product_loops.fastest(Form(16, 4, 8, left_transposed=True), loops) == LIBRARY


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (((2, 3, 5), ((6, 5), (5, 1))), ((5, 4), None), Form(6, 4, 5)),
        (((6, 5), ((5, 6), (1, 5))), ((6, 4), None), Form(5, 4, 6, left_transposed=True)),
        (((6, 5), None), ((4, 5), ((5, 4), (1, 5))), Form(6, 4, 5, right_transposed=True)),
        (((2, 3, 5), None), ((2, 5, 4), None), Form(3, 4, 5, batch=2)),
        (
            ((1, 2, 5, 3), ((2, 3, 5), (15, 1, 3))),
            ((2, 4, 5), ((2, 5, 4), (20, 1, 5))),
            Form(3, 4, 5, left_transposed=True, right_transposed=True, batch=2),
        ),
        (((3, 2, 5), ((2, 3, 5), (5, 10, 1))), ((2, 5, 4), None), None),
        (((6, 9), ((6, 5), (9, 1))), ((5, 4), None), None),
        (((6, 5), None), ((5,), ((5, 4), (1, 0))), None),
    ],
)
def test_forms(left: Operand, right: Operand, expected: Form | None) -> None:
    result = expected.shapes[2] if expected else ((2, 3, 4) if len(right[0]) == 3 else (6, 4))
    assert form_of(left, right, result) == expected

"""CombineGradientMatmul: one product for the input's gradients, and one for the weights'."""

# ruff: noqa: ANN201, ANN202  (the Relax functions here are TVM script)

from __future__ import annotations

import copy

import torch
import tvm
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, compile_and_run, operators
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.passes.relax.combine_gradient_matmul import CombineGradientMatmul


@I.ir_module
class Before:
    """A function in which the value's gradient is computed and read before the query's."""

    @R.function
    def main(
        x: R.Tensor((6, 4), "float64"),
        wq: R.Tensor((5, 4), "float64"),
        wv: R.Tensor((2, 4), "float64"),
        g: R.Tensor((6, 5), "float64"),
        gv: R.Tensor((6, 2), "float64"),
        rest: R.Tensor((2, 3, 4), "float64"),
    ):
        with R.dataflow():
            dv = R.matmul(gv, wv)
            gv_t = R.permute_dims(gv, axes=[1, 0])
            dwv = R.matmul(gv_t, x)
            dwv2 = R.multiply(dwv, R.const(2.0, "float64"))
            dv3 = R.reshape(dv, R.shape([2, 3, 4]))
            sum1 = R.add(rest, dv3)
            gq = R.tanh(g)
            wq_t = R.permute_dims(wq, axes=[1, 0])
            wq_tt = R.permute_dims(wq_t, axes=[1, 0])
            dq = R.matmul(gq, wq_tt)
            gq_t = R.permute_dims(gq, axes=[1, 0])
            dwq = R.matmul(gq_t, x)
            dq3 = R.reshape(dq, R.shape([2, 3, 4]))
            sum2 = R.add(sum1, dq3)
            out = (sum2, dwq, dwv2)
            R.output(out)
        return out


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((6, 4), "float64"),
        wq: R.Tensor((5, 4), "float64"),
        wv: R.Tensor((2, 4), "float64"),
        g: R.Tensor((6, 5), "float64"),
        gv: R.Tensor((6, 2), "float64"),
        rest: R.Tensor((2, 3, 4), "float64"),
    ):
        with R.dataflow():
            gq = R.tanh(g)
            together = R.concat((gq, gv), axis=1)
            together_t = R.permute_dims(together, axes=[1, 0])
            dw = R.matmul(together_t, x)
            dwv = R.strided_slice(dw, (0,), (5,), (7,))
            dwv2 = R.multiply(dwv, R.const(2.0, "float64"))
            dwq = R.strided_slice(dw, (0,), (0,), (5,))
            w = R.concat((wq, wv), axis=0)
            dx = R.matmul(together, w)
            dx3 = R.reshape(dx, R.shape([2, 3, 4]))
            sum2 = R.add(rest, dx3)
            out = (sum2, dwq, dwv2)
            R.output(out)
        return out


PASS = CombineGradientMatmul((("wq", "wv"),))
CLEAN = tvm.relax.transform.DeadCodeElimination(["main"])


def arguments() -> list[torch.Tensor]:
    shapes = [(6, 4), (5, 4), (2, 4), (6, 5), (6, 2), (2, 3, 4)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_gradients_become_one_product_each() -> None:
    after, report = apply_pass(PASS, Before)
    tvm.ir.assert_structural_equal(CLEAN(after), Expected)
    assert (report.rewrites, report.declined) == (2, [])


def test_agrees_with_pytorch_in_float64() -> None:
    x, wq, wv, g, gv, rest = values = arguments()
    dx, dwq, dwv = compile_and_run(CLEAN(PASS(Before)), *values)
    expected = rest + (gv @ wv + g.tanh() @ wq).view(2, 3, 4)
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dwq, g.tanh().T @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dwv, 2 * gv.T @ x, rtol=1e-12, atol=1e-12)


def test_applied_twice_changes_nothing() -> None:
    once = CLEAN(PASS(Before))
    twice, report = apply_pass(PASS, once)
    tvm.ir.assert_structural_equal(twice, once)
    assert report.declined == ["gradients of wq, wv: 0 products with wq instead of one"]


def test_each_kind_can_be_refused() -> None:
    after, report = apply_pass(
        CombineGradientMatmul((("wq", "wv"),), weight_refusal=lambda group: "slower"), Before
    )
    assert operators(CLEAN(after)).count("relax.matmul") == 3
    assert report.declined == ["weight gradients of wq, wv: slower"]
    after, report = apply_pass(
        CombineGradientMatmul((("wq", "wv"),), input_refusal=lambda group: "slower"), Before
    )
    assert operators(CLEAN(after)).count("relax.matmul") == 3
    for ours, theirs in zip(
        compile_and_run(CLEAN(after), *(values := arguments())),
        compile_and_run(Before, *values),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_declines_with_the_reason() -> None:
    @I.ir_module
    class Declined:
        @R.function
        def main(
            x: R.Tensor((6, 4), "float64"),
            wq: R.Tensor((5, 4), "float64"),
            wv: R.Tensor((4, 4), "float64"),
            gq: R.Tensor((6, 5), "float64"),
            gv: R.Tensor((6, 4), "float64"),
        ):
            with R.dataflow():
                dv = R.matmul(gv, wv)
                dq = R.matmul(gq, wq)
                dwv = R.matmul(R.permute_dims(gv), x)
                dwq = R.matmul(R.permute_dims(gq), R.tanh(x))
                out = (dv, dq, dwv, dwq)
                R.output(out)
            return out

    after, report = apply_pass(PASS, Declined)
    tvm.ir.assert_structural_equal(after, Declined)
    assert report.declined == [
        "input gradients of wq, wv: they are not added up",
        "weight gradients of wq, wv: not one product each, with a common input",
    ]


def test_a_gradient_that_another_waits_for_is_declined() -> None:
    @I.ir_module
    class Waiting:
        @R.function
        def main(
            x: R.Tensor((4, 4), "float64"),
            wq: R.Tensor((4, 4), "float64"),
            wv: R.Tensor((4, 4), "float64"),
            g: R.Tensor((4, 4), "float64"),
        ):
            with R.dataflow():
                dv = R.matmul(g, wv)
                dwv = R.matmul(R.permute_dims(g), x)
                gq = R.tanh(dwv)
                dq = R.matmul(gq, wq)
                dwq = R.matmul(R.permute_dims(gq), x)
                total = R.add(dv, dq)
                out = (total, dwv, dwq)
                R.output(out)
            return out

    after, report = apply_pass(PASS, Waiting)
    assert report.rewrites == 1
    assert report.declined == ["weight gradients of wq, wv: one depends on another"]
    values = [torch.randn(4, 4, dtype=torch.float64) for _ in range(4)]
    for ours, theirs in zip(
        compile_and_run(CLEAN(after), *values), compile_and_run(Waiting, *values), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_weight_that_stands_in_it_twice_is_declined() -> None:
    mod, report = apply_pass(CombineGradientMatmul((("wq", "wq"),)), Before)
    tvm.ir.assert_structural_equal(mod, Before)
    assert report.declined == ["gradients of wq, wq: a weight stands in it twice"]


class WithItself(nn.Module):
    """A module with a linear layer, and its weight concatenated with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * x.sum(), torch.cat([self.linear.weight] * 2).sin()


def test_a_weight_that_forward_concatenates_with_itself() -> None:
    module, x = WithItself(), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ours = add_tvm_dispatch(copy.deepcopy(module), x, options={"combine_matmuls": "always"})
    found, expected = (
        torch.autograd.grad(sum(o.sum() for o in m(x)), [x, *m.parameters()])
        for m in (ours, module)
    )
    torch.testing.assert_close(found, expected)
    assert dispatch_report(ours).tvm_calls == 1

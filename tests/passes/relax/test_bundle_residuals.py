"""BundleResiduals: all residuals become one result of forward and one parameter of backward."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

from typing import Any

import torch
import tvm
from torch.utils.dlpack import from_dlpack
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, assert_becomes
from tvmbridge.backends import resolve_target
from tvmbridge.compiler.build import build
from tvmbridge.compiler.executable import LoadedModule, lent_tensors, tensors_of
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals

BUNDLE = BundleResiduals(num_outputs=1, first=1, count=2)


@I.ir_module
class Before:
    @R.function
    def forward(x: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            sine = R.sin(x)
            cosine = R.cos(x)
            y = R.multiply(sine, cosine)
            gv = (y, sine, cosine)
            R.output(gv)
        return gv

    @R.function
    def backward(
        x: R.Tensor((2, 3), "float64"),
        sine: R.Tensor((2, 3), "float64"),
        cosine: R.Tensor((2, 3), "float64"),
        ct: R.Tensor((2, 3), "float64"),
    ):
        with R.dataflow():
            difference = R.subtract(R.multiply(cosine, cosine), R.multiply(sine, sine))
            gradient = R.multiply(ct, difference)
            gv = (gradient,)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def forward(x: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            sine = R.sin(x)
            cosine = R.cos(x)
            y = R.multiply(sine, cosine)
            residuals = (sine, cosine)
            results = (y, residuals)
            R.output(results)
        return results

    @R.function
    def backward(
        x: R.Tensor((2, 3), "float64"),
        residuals: R.Any,
        ct: R.Tensor((2, 3), "float64"),
    ):
        with R.dataflow():
            sine = R.call_pure_packed(
                "vm.builtin.tuple_getitem",
                residuals,
                R.prim_value(0),
                ty_args=R.Tensor((2, 3), "float64"),
            )
            cosine = R.call_pure_packed(
                "vm.builtin.tuple_getitem",
                residuals,
                R.prim_value(1),
                ty_args=R.Tensor((2, 3), "float64"),
            )
            _ = R.call_pure_packed("tvmbridge.empty_residuals", residuals, ty_args=R.Tuple())
            difference = R.subtract(R.multiply(cosine, cosine), R.multiply(sine, sine))
            gradient = R.multiply(ct, difference)
            gv = (gradient,)
            R.output(gv)
        return gv


def test_before_and_expected() -> None:
    assert_becomes(BUNDLE, Before, Expected, 2)


def test_without_a_backward_nothing_is_taken() -> None:
    alone = tvm.IRModule({"backward": Before["backward"]})
    after, report = apply_pass(BUNDLE, alone)
    tvm.ir.assert_structural_equal(after["backward"], Expected["backward"])
    assert report.rewrites == 1


def test_numbers_and_residuals_of_either_kind() -> None:
    built = build(Before, resolve_target(None), [], bundle=BUNDLE)
    loaded = LoadedModule(built.machine, built.unaligned)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, 3, dtype=torch.float64)
    expected = x.sin() * x.cos()
    (gradient,) = torch.autograd.grad(expected, x, cotangent)
    output, residuals = loaded.run("forward", [x.detach()])
    torch.testing.assert_close(output, expected.detach())
    tensors = tensors_of(residuals)
    torch.testing.assert_close(tensors, [x.detach().sin(), x.detach().cos()])
    lent = lent_tensors(residuals)
    torch.testing.assert_close(list(lent), tensors)
    assert [t.data_ptr() for t in lent] == [from_dlpack(r).data_ptr() for r in residuals]
    # Saved-tensor hooks may return a tensor with any strides and alignment.
    awkward = tuple(torch.cat([t.new_zeros(1), t.flatten()])[1:].view(2, 3) for t in tensors)
    kinds: list[Any] = [
        residuals,
        tuple(tensors),
        awkward,
        tuple(t.t().clone().t() for t in tensors),
    ]
    for given in kinds:
        (found,) = loaded.run("backward", [x.detach(), given, cotangent])
        torch.testing.assert_close(found, gradient)


def test_without_residuals() -> None:
    none = BundleResiduals(num_outputs=3, first=4, count=0)
    built = build(Before, resolve_target(None), [], bundle=none)
    *_, residuals = LoadedModule(built.machine, built.unaligned).run(
        "forward", [torch.ones(2, 3, dtype=torch.float64)]
    )
    assert len(residuals) == 0

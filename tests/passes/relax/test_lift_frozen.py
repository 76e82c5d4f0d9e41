"""LiftFrozen and PackProducts: a function for values of weights alone, and packed weights."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import (
    CompiledFunctions,
    apply_pass,
    assert_changes_nothing,
    operators,
)
from tvmbridge.kernels.packed import MKL, ONEDNN, WeightPacking
from tvmbridge.passes.relax.lift_frozen import LiftFrozen
from tvmbridge.passes.relax.pack_products import FrozenProduct, PackProducts, frozen_products


@I.ir_module
class Before:
    @R.function
    def forward(
        x: R.Tensor((3, 4), "float32"),
        a: R.Tensor((4, 4), "float32"),
        b: R.Tensor((4, 4), "float32"),
        bias: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            w = R.multiply(a, b)
            turned = R.permute_dims(w, axes=[1, 0])
            product = R.matmul(x, turned)
            y = R.add(product, bias)
            wide = R.reshape(y, R.shape([1, 3, 4]))
            z = R.nn.gelu(wide)
            gv = (z,)
            R.output(gv)
        return gv


@I.ir_module
class Lifted:
    @R.function
    def forward(
        x: R.Tensor((3, 4), "float32"),
        bias: R.Tensor((4,), "float32"),
        frozen_0: R.Tensor((4, 4), "float32"),
    ):
        with R.dataflow():
            turned = R.permute_dims(frozen_0, axes=[1, 0])
            product = R.matmul(x, turned)
            y = R.add(product, bias)
            wide = R.reshape(y, R.shape([1, 3, 4]))
            z = R.nn.gelu(wide)
            gv = (z,)
            R.output(gv)
        return gv

    @R.function
    def transform_params(a: R.Tensor((4, 4), "float32"), b: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            w = R.multiply(a, b)
            results = (w,)
            R.output(results)
        return results


LIFT = LiftFrozen(("a", "b", "bias"))


def test_structure() -> None:
    after, report = apply_pass(LIFT, Before)
    tvm.ir.assert_structural_equal(after["forward"], Lifted["forward"])
    tvm.ir.assert_structural_equal(
        after["transform_params"].without_attr("global_symbol"),
        Lifted["transform_params"].without_attr("global_symbol"),
    )
    assert report.rewrites == 1


def test_what_calls_decide_stays() -> None:
    assert_changes_nothing(LiftFrozen(("a",)), Before)


def test_twice_is_once() -> None:
    assert_changes_nothing(LIFT, LIFT(Before))


def test_products_are_found() -> None:
    found = frozen_products(Lifted["forward"], ("frozen_0",))
    assert found == (FrozenProduct("frozen_0", True, 3, 4, 4),)
    assert frozen_products(Lifted["forward"], ("bias",)) == ()


@pytest.mark.parametrize("library", [ONEDNN, MKL])
def test_values(library: str) -> None:
    if not (torch.backends.mkl if library == MKL else torch.backends.mkldnn).is_available():
        pytest.skip("this PyTorch has no such library")
    x, a, b, bias = (torch.randn(s) for s in ((3, 4), (4, 4), (4, 4), (4,)))
    packing = WeightPacking(library, 3, True)
    mod, report = apply_pass(PackProducts((("frozen_0", packing),)), Lifted)
    for pass_ in (relax.transform.DeadCodeElimination(), relax.transform.CanonicalizeBindings()):
        mod = pass_(mod)
    assert report.rewrites == 1
    assert [p.name for p in mod["forward"].params] == ["x", "bias", "frozen_0", "packed_0"]
    assert ("relax.nn.gelu" in operators(mod)) == (library == MKL)
    functions = CompiledFunctions(mod)
    (weight,) = functions("transform_params", a, b)
    packed = packing.pack(weight)
    (found,) = functions("forward", x, bias, weight, packed.ticket)
    exact = torch.nn.functional.gelu(x.double() @ (a * b).double().T + bias)[None]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_other_rows_are_not_packed() -> None:
    _, report = apply_pass(PackProducts((("frozen_0", WeightPacking(ONEDNN, 5, True)),)), Lifted)
    assert report.rewrites == 0

"""OwnResiduals: residuals share no memory with arguments and outputs."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, assert_changes_nothing, compile_and_run
from tvmbridge.passes.base import storage_roots
from tvmbridge.passes.relax.own_residuals import OwnResiduals

OWN = OwnResiduals(num_outputs=1)


@I.ir_module
class Before:
    @R.function
    def forward(x: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            sine = R.sin(x)
            flat = R.reshape(sine, (6,))
            cosine = R.cos(x)
            gv = (sine, flat, cosine, x)
            R.output(gv)
        return gv


@I.ir_module
class Apart:
    @R.function
    def forward(x: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            sine = R.sin(x)
            cosine = R.cos(x)
            gv = (sine, cosine)
            R.output(gv)
        return gv


def _roots(mod: tvm.IRModule) -> list[relax.Var | None]:
    return storage_roots(mod["forward"])


def test_views_of_outputs_and_arguments_are_copied() -> None:
    after, report = apply_pass(OWN, Before)
    assert report.rewrites == 2
    roots = _roots(after)
    assert len({*roots, *after["forward"].params}) == 5
    tvm.ir.assert_structural_equal(after["forward"].ret_ty, Before["forward"].ret_ty)


def test_residuals_with_memory_of_their_own_stay() -> None:
    after, report = apply_pass(OWN, Apart)
    tvm.ir.assert_structural_equal(after, Apart)
    assert report.rewrites == 0


def test_the_numbers_are_the_same() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    after, _ = apply_pass(OWN, Before)
    found = compile_and_run(after, x, name="forward")
    expected = [x.sin(), x.sin().flatten(), x.cos(), x]
    torch.testing.assert_close(found, expected)


def test_twice_is_once() -> None:
    assert_changes_nothing(OWN, OWN(Before))

"""ConvolutionsInLoops: the calls that become functions of loops, and their results."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax

from tests.convolution_helpers import by_definition
from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
)
from tvmbridge.kernels.convolution import Convolution
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.passes.relax import convolutions_in_loops
from tvmbridge.passes.relax.convolutions_in_loops import ConvolutionsInLoops
from tvmbridge.schedules.alone import this_machine
from tvmbridge.schedules.convolutions import convolution

MEASURED = ConvolutionsInLoops(measure=True)
SIZE = (2, 32, 40, 7, 9)


def _form(part: ConvolutionResult) -> SameConvolution:
    return SameConvolution(part, *SIZE, biased=part is ConvolutionResult.RESULT)


def _module(
    part: ConvolutionResult, dtype: torch.dtype = torch.float32, stride: int = 1
) -> tuple[tvm.IRModule, list[torch.Tensor]]:
    """Return ``main`` with the ATen call of a convolution or its gradient, and the operands."""
    torch.manual_seed(0)
    form = _form(part)
    given = [torch.randn(shape, dtype=dtype) for shape in form.shapes[:-1]]
    settings = Convolution((stride, stride), (1, 1), (1, 1), False, (0, 0), 1)
    out = relax.TensorType(form.shapes[-1], str(dtype).removeprefix("torch."))
    if part is ConvolutionResult.RESULT:
        return build_main(given, lambda *x: settings.kernel_call(list(x), out)), given
    place = 0 if part is ConvolutionResult.DATA else 1
    wanted = torch.empty(form.shapes[-1], dtype=dtype)
    operands = [given[0], *((wanted, given[1]) if place == 0 else (given[1], wanted))]

    def formula(*x: relax.Expr) -> relax.Expr:
        return relax.TupleGetItem(settings.gradient_call(*x, place), 0)

    return build_main(operands, formula), operands


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pass believe that loops are always faster."""
    monkeypatch.setattr(convolutions_in_loops, "faster_in_loops", lambda form, make: True)


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("part", ConvolutionResult)
def test_calls_become_loops(part: ConvolutionResult) -> None:
    mod, operands = _module(part)
    after, report = apply_pass(MEASURED, mod)
    assert report.rewrites == 1
    assert "aten" not in after["main"].script()
    function = convolution(_form(part), this_machine())
    tvm.ir.assert_structural_equal(after["convolution"], function)
    read = {
        ConvolutionResult.RESULT: [0, 1, 2],
        ConvolutionResult.DATA: [0, 2],
        ConvolutionResult.WEIGHT: [0, 1],
    }[part]
    exact = by_definition(_form(part), [operands[i].double() for i in read])
    (found,) = compile_and_run(after, *operands)
    # The tolerance fits sums of a few hundred products of numbers around 1.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)


@pytest.mark.usefixtures("faster")
def test_other_convolutions_stay() -> None:
    assert_changes_nothing(MEASURED, _module(ConvolutionResult.RESULT, torch.float64)[0])
    assert_changes_nothing(MEASURED, _module(ConvolutionResult.RESULT, stride=2)[0])
    assert_changes_nothing(ConvolutionsInLoops(), _module(ConvolutionResult.DATA)[0])


def test_what_is_not_faster_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions_in_loops, "faster_in_loops", lambda form, make: False)
    report = assert_changes_nothing(MEASURED, _module(ConvolutionResult.WEIGHT)[0])
    assert "loops are not known to be faster" in str(report.declined)

"""The accuracy check reports a loss of accuracy, and long sums have none."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from tests.conformance.accuracy import AccuracyCheck, less_accurate
from tests.conformance.case import case_of
from tests.conformance.check import GroupFailed
from tests.conformance.coverage import operators_with_long_rows
from tests.conformance.samples import accuracy_cases

EXACT = torch.linspace(1, 2, 500, dtype=torch.float64)


def test_one_rounding_is_no_loss_and_several_are() -> None:
    once = EXACT.to(torch.bfloat16)
    twice = (once * 3 - once - once).to(torch.bfloat16)
    assert less_accurate([once], [once], [EXACT]) is None
    assert less_accurate([once.nextafter(once * 2)], [once], [EXACT]) is not None
    assert less_accurate([once], [twice], [EXACT]) is None
    assert "tensor 1" in (less_accurate([1, once + 0.1], [1, once], [1, EXACT]) or "")


def test_a_loss_is_found() -> None:
    case = case_of("0", SampleInput(torch.rand(64, 50).bfloat16()))
    check = AccuracyCheck(lambda x: x.sum(0))
    exact = case.tensors[0].sum(0)
    poor = torch.zeros(50, dtype=torch.bfloat16)
    for row in case.tensors[0]:
        poor = poor + row
    theirs = [exact], [], None, None
    assert check.difference(case, ([exact], [], None, None), theirs) is None
    assert "is off by" in (check.difference(case, ([poor], [], None, None), theirs) or "")


@pytest.mark.parametrize(
    "joint", [pytest.param(None, marks=pytest.mark.slow), "auto"], ids=["forward", "gradient"]
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "name", ["long_rows:made", pytest.param("long_pairs:made", marks=pytest.mark.slow)]
)
def test_long_rows_lose_nothing(name: str, dtype: torch.dtype, joint: str | None) -> None:
    check = AccuracyCheck(operators_with_long_rows()[name].op, joint=joint)
    cases = accuracy_cases(name, dtype, 0, gradient=joint is not None)
    accepted = [case for case in cases if check.accepts(case)]
    assert len(accepted) > 8
    try:
        outcomes = check.group(accepted)
    except GroupFailed:
        outcomes = [o for case in accepted for o in check.group([case])]
    assert [(o.label, o.reason) for o in outcomes if o.result in ("wrong", "error")] == []

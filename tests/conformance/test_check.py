"""The conformance run compares structure, values and gradients, and finds planted mistakes."""

from __future__ import annotations

import torch

from tests.conformance.case import Case
from tests.conformance.check import Check
from tests.conformance.compare import compare, is_as_near
from tests.conformance.coverage import operators
from tests.conformance.evaluate import Calls, eager, evaluate, inputs_of
from tests.conformance.samples import cases_of


def _cases() -> list[Case]:
    return cases_of("mul", torch.float64, 2, gradient=True)[:3]


def test_a_case_has_the_same_gradient_in_every_group() -> None:
    """The float64 reference is computed for one case alone, so it must fit any group."""
    cases, op = _cases(), operators()["mul"].op
    group = evaluate(Calls(op, cases), cases, inputs_of(cases), gradient=True)
    assert group.gradients is not None
    for case, found in zip(cases, group.gradients, strict=True):
        alone = eager(op, case, gradient=True).gradients
        assert alone is not None
        torch.testing.assert_close(found, alone[0], rtol=0, atol=0, equal_nan=True)


def test_a_wrong_gradient_is_no_rounding() -> None:
    case, op = _cases()[0], operators()["mul"].op
    values = eager(op, case, gradient=True)
    assert values.gradients is not None
    assert values.requires is not None
    theirs = values.results[0], values.inputs[0], values.gradients[0], values.requires[0]
    wrong = [None if g is None else g * 1.001 for g in values.gradients[0]]
    check = Check(op, joint="auto")
    assert check._is_rounding(case, theirs, theirs)
    assert not check._is_rounding(case, (*theirs[:2], wrong, theirs[3]), theirs)


def test_each_tensor_is_judged_by_itself() -> None:
    """A rounding difference in one tensor does not make another, which agrees, fail."""
    exact = [torch.tensor([1e3, 1.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)]
    theirs = [exact[0].float() + torch.tensor([0.0, 1e-4]), exact[1].float()]
    # The first is closer than eager's; the second is within tolerance, although eager's is exact.
    ours = [exact[0].float(), exact[1].float() * (1 + 1e-6)]
    assert compare(ours, theirs, values=True)
    assert is_as_near(ours, theirs, exact)
    assert not is_as_near([ours[0], ours[1] * 1.001], theirs, exact)
    assert not is_as_near([ours[0] + 1.0, ours[1]], theirs, exact)

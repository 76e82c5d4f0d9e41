"""Special values: where they are placed, which results are right, and that mistakes are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.opinfo.core import SampleInput

from tests.conformance import special
from tests.conformance.answers import Question, Strictness, difference, leaves_of, other_answers
from tests.conformance.case import Case, case_of
from tests.conformance.evaluate import Calls, Values, evaluate, inputs_of
from tests.conformance.fillings import FILLINGS, fillable, filled, for_sums, special_values
from tests.conformance.special import SpecialCheck

INF, NAN = float("inf"), float("nan")
LOCAL, SUM = Strictness(local=True), Strictness(local=False, overflow=True, magnitude=1e6)


def _case(*tensors: torch.Tensor) -> Case:
    return case_of("0", SampleInput(tensors[0], args=tensors[1:]))


def test_integers_of_another_dtype_keep_their_values() -> None:
    case = _case(torch.ones(4, 4), torch.ones(4, dtype=torch.int64), torch.ones(3).double())
    assert fillable(case, torch.float32) == [0, 2]
    assert fillable(case, torch.int64) == [0, 1, 2]
    nan = next(f for f in FILLINGS if f.kinds == ("nan",))
    after = filled(case, nan, [0])
    assert after is not None
    assert after.tensors[0].isnan().any()
    assert after.tensors[1] is case.tensors[1]
    assert case.tensors[0].isfinite().all()
    assert filled(case, nan, [1]) is None


def test_values_are_those_of_the_dtype() -> None:
    assert special_values(torch.int8, "largest") == (127,)
    assert special_values(torch.int32, "wide") == (2**24 + 1,)
    assert 0.0 < special_values(torch.float32, "tiny")[2] < torch.finfo(torch.float32).tiny
    assert all("largest" not in for_sums(f).kinds for f in FILLINGS if len(f.kinds) > 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "others", "strict", "right"),
    [
        ([NAN, INF], [NAN, INF], [], LOCAL, True),
        ([NAN, INF], [NAN, -INF], [], LOCAL, False),
        ([NAN, 1.0], [0.0, 1.0], [], LOCAL, False),
        ([0.0], [-0.0], [], LOCAL, False),
        ([0.0], [-0.0], [], Strictness(local=True, signed=False), True),
        ([0.0], [-0.0], [], SUM, True),
        ([0.0], [1e-40], [], LOCAL, False),
        # Each element may agree with a different one of eager's results.
        ([NAN, INF], [0.0, INF], [[NAN, 1.0]], LOCAL, True),
        ([NAN, 2.0], [0.0, INF], [[NAN, 1.0]], LOCAL, False),
        ([0.2], [0.0], [[0.1]], SUM, True),
        ([0.3], [0.0], [[0.1]], LOCAL, False),
        ([INF], [3e38], [], SUM, True),
        ([INF], [3e38], [], LOCAL, False),
        ([NAN], [3.0], [], SUM, False),
    ],
)
def test_what_agrees(
    ours: list[float],
    theirs: list[float],
    others: Sequence[list[float]],
    strict: Strictness,
    right: bool,
) -> None:
    known = [[torch.tensor(answer)] for answer in others]
    found = difference([torch.tensor(ours)], [torch.tensor(theirs)], lambda: known, strict)
    assert (found is None) is right


def test_all_ways_of_asking_agree_where_eager_is_settled() -> None:
    """The five further eager results (strided, float64, three of a batch) of tanh are all equal."""
    case = _case(torch.tensor([0.5, NAN, INF, -INF, 0.0, 2.0]).requires_grad_())
    module = Calls(torch.tanh, [case])
    theirs = evaluate(module, [case], inputs_of([case]), gradient=True)
    answers = list(other_answers(Question(torch.tanh, case, True), theirs, 0))
    assert len(answers) == 5
    first = leaves_of(theirs, 0)
    for answer in answers:
        found = [a.to(b.dtype) for a, b in zip(answer, first, strict=True)]
        torch.testing.assert_close(found, first, equal_nan=True)


def _losing_nan(module: nn.Module, *args: Any, **options: Any) -> Values:
    """Evaluate a module; replace NaN by zero in the results of a dispatched module."""
    values = evaluate(module, *args, **options)
    if "forward" not in vars(module):
        return values
    lost = [torch.where(result.isnan(), 0.0, result) for result in values.results]
    return replace(values, results=lost)


def test_a_mistake_with_nan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case(torch.linspace(-2.0, 2.0, 12).reshape(3, 4))
    check = SpecialCheck(torch.relu, torch.float32, local=True)
    assert check.accepts(case)
    monkeypatch.setattr(special, "evaluate", _losing_nan)
    (outcome,) = check.group([case])
    assert outcome.result == "wrong"
    assert "100% nan: tensor 0 (3, 4) at (0, 0): 0.0 instead of nan; 12 of 12" in outcome.reason
    assert " -inf: " not in outcome.reason

"""Gradients at NaN, infinities and extremes, and for cotangents of them: those of eager PyTorch.

All samples of all operators: ``python -m tests.conformance --values special --modes auto``.
"""

from __future__ import annotations

import torch

from tests.conformance.made import Made
from tests.conformance.samples import cases_of_samples
from tests.conformance.special import SpecialCheck

FUNCTIONS = (
    # TVM would take it apart, and subtract one infinite part from another.
    lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.lerp(x, y, y.sigmoid()),
)


def test_gradients_are_those_of_eager_pytorch() -> None:
    made = Made("special", FUNCTIONS, frozenset({torch.float32}), count=2, shape=(4, 5))
    cases = cases_of_samples(made.sample_inputs("cpu", torch.float32, requires_grad=True))
    check = SpecialCheck(made.op, torch.float32, local=False, joint="auto")
    assert all(check.accepts(case) for case in cases)
    outcomes = check.group(cases)
    assert not [outcome.reason for outcome in outcomes if outcome.result == "wrong"]

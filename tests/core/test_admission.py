"""Admission: a converter or rule is used only in the dtypes that the table says are proven."""

from __future__ import annotations

import json

import pytest
import torch

from tests.frontend.helpers import run
from tvmbridge.core import admission
from tvmbridge.core.admission import (
    ADMITTED_FILE,
    SECTIONS,
    admitted_table,
    is_proven,
    recorded_uses,
)
from tvmbridge.frontend.registry import CONVERTERS
from tvmbridge.gradients import CLAIMED
from tvmbridge.gradients.operators import SAME_DERIVATIVE
from tvmbridge.kernels.dtypes import to_relax_dtype

X = torch.randn(3, 4)


@pytest.fixture
def without_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the admission table: relu is proven for float64 only."""
    table = {section: dict(names) for section, names in admitted_table().items()}
    table["converters"]["aten.relu.default"] = frozenset({"float64"})
    monkeypatch.setattr(admission, "admitted_table", lambda: table)


@pytest.mark.usefixtures("without_relu")
def test_an_unproven_converter_is_not_used() -> None:
    _, report = run(lambda x: x.relu() + 1, X)
    specialization = report.specializations[0]
    assert set(specialization.aten_operators) == {"aten.relu.default"}
    assert set(specialization.native_operators) == {"aten.add.Tensor"}


@pytest.mark.usefixtures("without_relu")
def test_it_is_used_in_the_dtypes_that_are_proven() -> None:
    _, report = run(lambda x: x.relu(), X.double())
    assert not report.specializations[0].aten_operators


@pytest.mark.usefixtures("without_relu")
def test_everything_is_tried_when_asked_for() -> None:
    with recorded_uses(everything=True) as seen:
        _, report = run(lambda x: x.relu(), X)
    assert not report.specializations[0].aten_operators
    assert seen.used["converters"]["aten.relu.default"] == {"float32"}


def test_only_what_was_used_is_seen() -> None:
    with recorded_uses() as seen:
        run(lambda x: x.exp().cumsum(0), X)
    assert set(seen.used["converters"]) >= {"aten.exp.default"}
    assert "aten.mul.Tensor" not in seen.used["converters"]


def test_all_of_the_dtypes_must_be_proven() -> None:
    assert is_proven("converters", "aten.where.self", ["bool", "float32"])
    assert not is_proven("converters", "aten.where.self", ["bool", "complex64"])
    assert not is_proven("converters", "aten.no_such_operator.default", ["float32"])


def test_the_table_is_sorted_and_holds_claims_only() -> None:
    content = json.loads(ADMITTED_FILE.read_text(encoding="utf-8"))
    claims = {
        "converters": {str(overload) for overload in CONVERTERS},
        "rules": set(CLAIMED),
        "derivatives": set(SAME_DERIVATIVE),
    }
    assert tuple(content) == SECTIONS
    for section, names in content.items():
        assert list(names) == sorted(names)
        assert set(names) <= claims[section]
        assert all(dtypes.split() == sorted(dtypes.split()) for dtypes in names.values())


def test_converters_claim_the_dtypes_that_they_are_admitted_for() -> None:
    by_name = {str(overload): converter for overload, converter in CONVERTERS.items()}
    for name, dtypes in admitted_table()["converters"].items():
        assert dtypes <= {to_relax_dtype(d) for d in by_name[name].dtypes}, name

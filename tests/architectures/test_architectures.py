"""Check a few architectures in the default suite, and all of them with ``make test-slow``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.architectures.check import Outcome, check
from tests.architectures.compare import TOLERANCES, difference
from tests.architectures.runner import Entry, run_entries
from tests.architectures.table import architectures

# A training step of BERT is a quick test in tests/end_to_end/test_bert_layer.py.
QUICK = [
    pytest.param("bert", "train", "float64", marks=pytest.mark.slow),
    ("gpt2", "cache", "float32"),
]


@pytest.mark.parametrize(("name", "mode", "dtype"), QUICK)
def test_quick(name: str, mode: str, dtype: str) -> None:
    outcome = check(name, mode, dtype)
    assert outcome.result == "whole", outcome.reason


@pytest.mark.slow
def test_what_is_refused_says_why() -> None:
    outcome = check("switch", "eval", "float32")
    assert outcome.result == "refused"
    assert "data-dependent" in outcome.reason


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["eval", "train", "cache"])
@pytest.mark.parametrize("name", list(architectures()))
def test_every_architecture(name: str, mode: str) -> None:
    if mode == "cache" and not architectures()[name].cached:
        return
    found: list[Outcome] = []
    run_entries([Entry(name, mode, "float32")], found.append, timeout=900.0)
    assert found[0].result in architectures()[name].outcomes(), found[0].reason


def test_comparison_notices() -> None:
    bound = TOLERANCES[torch.float64]
    x = torch.ones(3, dtype=torch.float64)
    assert difference({"a": x}, {"a": x + 1e-12}, bound) is None
    departures = [
        ({"a": x}, {"a": x + 1e-6}),
        ({"a": x}, {"a": x.float()}),
        ({"a": x}, {"b": x}),
        ([x], (x,)),
        ([x, x], [x]),
        ({"a": x}, {"a": None}),
        ([x], [x.clone().requires_grad_()]),
        ([x], [x * float("nan")]),
        ([torch.tensor([1])], [torch.tensor([2])]),
    ]
    for ours, theirs in departures:
        assert difference(ours, theirs, bound) is not None

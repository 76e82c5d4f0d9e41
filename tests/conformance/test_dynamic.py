"""Operators compiled for any number of rows agree with eager PyTorch at other numbers of rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance import dynamic
from tests.conformance.__main__ import main
from tests.conformance.dynamic import dynamic_cases
from tests.conformance.evaluate import Values

_NAMES = """
    add sub mul div:no_rounding_mode where clamp exp cumsum sum mean var amax softmax matmul cat
    index_select flip tril nn.functional.layer_norm nn.functional.linear
    nn.functional.avg_pool2d nn.functional.conv1d
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_other_numbers_of_rows_agree_with_eager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No case is wrong or crashes, and compiled code serves most cases."""
    out = tmp_path / "dynamic.jsonl"
    given = ["--dynamic", "--samples", "2", "--modes", "forward", "auto", "--out", str(out)]
    assert main([*given, "--ops", *_NAMES.split()]) == 0, capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    refused = [row["entry"] for row in rows if "refused" in row["cases"]]
    assert len(refused) <= len(rows) // 4, refused


def test_what_is_wrong_at_another_size_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (case, *_) = dynamic_cases("exp", torch.float32, 1, gradient=False)
    genuine = dynamic.evaluate

    def spoiled(module: nn.Module, cases: Any, inputs: Any, **options: Any) -> Values:
        found = genuine(module, cases, inputs, **options)
        compiled = "forward" in module.__dict__ and inputs[0].shape != case.tensors[0].shape
        return replace(found, results=[found.results[0] + 1]) if compiled else found

    check = dynamic.DynamicCheck(torch.exp)
    assert check.accepts(case)
    assert check.group([case])[0].result == "native"
    monkeypatch.setattr(dynamic, "evaluate", spoiled)
    (outcome,) = check.group([case])
    assert outcome.result == "wrong"
    assert outcome.reason.startswith("at (")

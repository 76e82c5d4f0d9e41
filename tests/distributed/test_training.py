"""Training over two processes against one: features of models, and larger models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import scripts, tied_scripts
from tests.distributed.models import Images, Language, cross_entropy, reference_steps
from tests.distributed.processes import run_ranks, values
from tests.distributed.test_two_processes import assert_equal, expected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("schedule", ["simple", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("stages", [2, 4])
def test_tied_parameters_and_clipping(schedule: str, stages: int) -> None:
    settings = {"stages": stages, "schedule": schedule, "tied": True, "clip": 0.5}
    outcomes = values(run_ranks(scripts.train, 2, settings))
    for found in outcomes:
        assert_equal(found, *expected(tied=True, clip=0.5))
        assert found["share"] == 1.0
        assert len(found["tied"]) == 1
        # Three steps of four micro-batches; the first stage has no gradients of inputs.
        once = {"inputs": 12, "weights": 12} if schedule == "zero_bubble" else {}
        assert found["halves"] == {stage: once if stage else {} for stage in range(stages)}
    first, second = (set(found["own"]) for found in outcomes)
    assert first | second == set(Language(tied=True).state_dict())
    assert first & second == {"embedding.weight", "head.weight"}


def test_a_shared_parameter_that_is_frozen_has_no_gradient() -> None:
    """Check that the gradient is None: with zeros, weight decay would change the parameter."""
    found = values(run_ranks(tied_scripts.frozen, 2))
    names = [name for name, _ in Language(tied=True).named_parameters()]
    assert sorted(found[0] + found[1]) == sorted(set(names) - {"embedding.weight"})


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
@pytest.mark.parametrize("stages", [2, 4])
def test_running_statistics(schedule: str, stages: int) -> None:
    torch.manual_seed(0)
    module = Images().double().train()
    losses = reference_steps(module, cross_entropy, [scripts.images()] * 3, 4, scripts.sgd)
    settings = {"stages": stages, "schedule": schedule}
    for found in values(run_ranks(scripts.train_images, 2, settings)):
        assert_equal(found, losses, module.state_dict())


def test_dropout_is_drawn_alike_by_schedules_compilers_and_ranks() -> None:
    """Check also that another seed draws other numbers."""
    common = {"stages": ["blocks.2"], "dropout": 0.3}
    first, *others = (
        values(run_ranks(scripts.train, ranks, {**common, **settings}))[0]
        for ranks, settings in (
            (2, {"schedule": "simple"}),
            (2, {"schedule": "interleaved"}),
            (2, {"schedule": "simple", "tvm": False}),
            (1, {"schedule": "interleaved", "tvm": False}),
        )
    )
    for other in others:
        assert_equal(other, first["losses"], first["state"])
    (another, _) = values(run_ranks(scripts.train, 2, {**common, "seed": 1, "tvm": False}))
    assert not torch.allclose(another["losses"], first["losses"])


def test_a_refused_stage_and_its_equals_run_in_eager_on_all_ranks() -> None:
    for eager in values(run_ranks(scripts.refused, 2)):
        assert eager[0] is None
        assert eager[2] is None or "as stage 1, which is equal" in eager[2]
        assert eager[1] is not None
        assert "UnsupportedOperatorError: there is no rule for aten.tanh" in eager[1]


def test_equal_stages_are_compiled_once(tmp_path: Path) -> None:
    for found in values(run_ranks(scripts.equal_stages, 2, str(tmp_path))):
        assert found["equal_to"] == {0: 0, 1: 1, 2: 1, 3: 3}
        assert found["cache"][2] == ("hit",)


@pytest.mark.parametrize(("model", "ranks"), [("minilm", 2), ("gpt2", 2), ("gpt2", 4)])
def test_larger_models_train_as_by_one_process(model: str, ranks: int) -> None:
    """Train 20 steps by both schedules, in float64 and float32, with one and two stages a rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "-m", "benchmarks.pipeline", "--rows", "equal",
        "--models", model, "--microbatches", "4", "--stages", str(ranks),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tvmbridge.demo.pipelined", "--steps", "3"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(found) == ["one process", "simple", "interleaved"]
    assert len(list(tmp_path.glob("timeline_*.svg"))) == 3

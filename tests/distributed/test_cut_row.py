"""The row ``cut`` of ``benchmarks.pipeline``, which compares the automatic cut with all others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.pipeline_cut import CUTS
from tests.distributed.models import Language, tokens
from tvmbridge.distributed.graph import capture_graph
from tvmbridge.distributed.plan import MicroBatch, PlanRequest, every_plan, make_plan


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.pipeline", "--rows", "cut", "--ranks", "2"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def test_every_plan_has_the_automatic_one() -> None:
    sample, args, kwargs = MicroBatch.of(tokens()[0], 4)
    graph = capture_graph(Language(tied=True).train(), args, kwargs)
    device = args[0].device
    chosen = make_plan(graph, sample, PlanRequest("simple", 4, None, 2, 2), device, None)
    plans = every_plan(graph, sample, chosen, device)
    # Cuts after the embedding and after each of the four blocks.
    assert len({p.positions for p in plans}) == len(plans) == 5
    assert chosen.positions in {p.positions for p in plans}
    for plan in plans:
        assert (plan.schedule, plan.orders) == (chosen.schedule, chosen.orders)
        assert len(plan.tied) == 1
        assert sum(s.operators for s in plan.stages) == len(graph.nodes)


@pytest.mark.slow
def test_a_model_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    done = run("--cuts", "5 alike")
    assert done.returncode == 2
    assert "invalid choice: '5 alike'" in done.stderr
    assert all(name in done.stderr for name in CUTS)


@pytest.mark.slow
def test_one_model_is_measured() -> None:
    done = run("--cuts", "4 alike", "--rounds", "1", "--size", "1", "--no-check")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("  4 alike: 6 cuts, planned in") for line in lines)
    assert sum(line.startswith("    at ") for line in lines) == 6
    assert any(line.startswith("cut of 4 alike at ") for line in lines)
    assert "8 growing" not in done.stdout

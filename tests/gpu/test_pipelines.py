"""Pipelines over two GPUs by NCCL: training equals one process's, and a fault ends each rank.

Each rank is started without torchrun, which would itself end the other ranks after a kill.
``TVMBRIDGE_TEST_DEVICE=cpu`` runs the tests by gloo on machines without GPUs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import VARIABLE
from tests.distributed.test_faults import seconds
from tests.distributed.test_two_processes import assert_equal, expected

DEVICE = os.environ.get(VARIABLE, "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASES: dict[str, dict[str, Any]] = {
    "simple": {"schedule": "simple"},
    "interleaved": {"schedule": "interleaved"},
    "simple, two stages a device": {"schedule": "simple", "stages": 4},
    "interleaved, two stages a device": {"schedule": "interleaved", "stages": 4},
    "zero bubble, two stages a device": {"schedule": "zero_bubble", "stages": 4},
    "tied, two stages a device": {"schedule": "interleaved", "stages": 4, "tied": True},
}
TIMEOUT = 20.0
# Seconds for a rank to start and to end, beyond the pipeline's timeout.
_SLACK = 150.0

_TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from tests.distributed import scripts
from tests.gpu.test_pipelines import CASES

rank = int(os.environ["RANK"])
found = {name: scripts.train(rank, settings) for name, settings in CASES.items()}
told = {"found": found, "backend": dist.get_backend(), "groups": scripts.group_count()}
torch.save(told, f"{sys.argv[1]}/{rank}.pt")
dist.destroy_process_group()
"""

_FAIL = """
import os, sys
from tests.distributed import scripts

how, timeout, schedule, blocks = sys.argv[1:5]
scripts.fail(
    int(os.environ["RANK"]), how, 1, float(timeout), schedule, int(blocks), sys.argv[5:] or None
)
"""

_FAIL_BACKWARD = """
import os, sys
from tests.distributed import scripts

scripts.fail_backward(int(os.environ["RANK"]), 3, sys.argv[1])
"""


@dataclass(frozen=True)
class Ended:
    """The exit status of a rank, and its standard error."""

    status: int
    text: str


def run_two(script: str, *arguments: object) -> list[Ended]:
    """Run the script as two ranks; return how each ended.

    Raises:
        subprocess.TimeoutExpired: a rank took longer than ``TIMEOUT + _SLACK`` seconds.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ranks = [
        subprocess.Popen(command, env=_environment(rank, port), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    end = time.monotonic() + TIMEOUT + _SLACK
    try:
        texts = [r.communicate(timeout=max(1, end - time.monotonic()))[1] for r in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [Ended(r.returncode, text) for r, text in zip(ranks, texts, strict=True)]


def _environment(rank: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    found = {**os.environ, **{name: str(value) for name, value in names.items()}}
    found.update(MASTER_ADDR="127.0.0.1", TVMBRIDGE_CACHE="0", OMP_NUM_THREADS="1")
    if DEVICE == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Sequence[dict[str, Any]]:
    """Train all cases in one start of two ranks; return each rank's results by case."""
    folder: Path = tmp_path_factory.mktemp("trained")
    for rank in run_two(_TRAIN, folder):
        assert rank.status == 0, rank.text[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(trained: Sequence[dict[str, Any]], case: str) -> None:
    """Compare losses and weights in float64 through TVM, to 1e-12."""
    wanted = expected(tied=CASES[case].get("tied", False))
    for rank in trained:
        found = rank["found"][case]
        assert_equal(found, *wanted)
        assert set(found["eager"].values()) == {None}
        assert found["share"] == 1.0


def test_the_ranks_were_connected_by_nccl_and_no_group_is_left(
    trained: Sequence[dict[str, Any]],
) -> None:
    for rank in trained:
        assert rank["backend"] == ("gloo" if DEVICE == "cpu" else "nccl")
        assert rank["groups"] == 1


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_an_exception_in_one_stage(schedule: str) -> None:
    for rank in run_two(_FAIL, "raises", TIMEOUT, schedule, 4):
        assert_told(rank, "stage 1 on rank 1 failed in forward of micro-batch 0")
        assert_told(rank, "ValueError: the disk is full")


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_an_exception_in_the_last_backward(schedule: str) -> None:
    for rank in run_two(_FAIL_BACKWARD, schedule):
        assert_told(rank, "stage 0 on rank 0 failed in backward of micro-batch")
        assert_told(rank, "RuntimeError: no gradient today")


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_a_killed_rank(schedule: str) -> None:
    first, second = run_two(_FAIL, "killed", TIMEOUT, schedule, 4)
    assert second.status == -9
    assert_told(first, "rank 0 (stage 0) waited for")
    assert_told(first, "stage 1 on rank 1")
    assert waited(first) < TIMEOUT + 5


def test_a_killed_rank_while_the_other_launches_more_than_a_gpu_takes() -> None:
    """Check kernel launches that block because the GPU waits for the killed rank."""
    first, second = run_two(_FAIL, "killed", TIMEOUT, "simple", 192, "blocks.128")
    assert second.status == -9
    assert_told(first, "rank 0 (stage 0) waited for")
    assert_told(first, "stage 1 on rank 1")
    assert waited(first) < 2 * TIMEOUT


def test_a_rank_that_stands_still() -> None:
    first, second = run_two(_FAIL, "sleeps", 9.0, "simple", 4)
    assert_told(first, "stage 1 on rank 1")
    assert 7 < waited(first) < 16
    assert_told(second, "stage")


def assert_told(rank: Ended, text: str) -> None:
    """Assert that the rank ended by its own error, not by a signal, and the error has the text."""
    assert rank.status == 1, (rank.status, rank.text[-3000:])
    assert text in _error(rank), rank.text[-3000:]


def waited(rank: Ended) -> float:
    """Return the seconds of the failed step."""
    return seconds(_error(rank))


def _error(rank: Ended) -> str:
    lines = [line for line in rank.text.splitlines() if "errors.PipelineError: " in line]
    assert lines, rank.text[-3000:]
    return lines[-1]

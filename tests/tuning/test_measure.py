"""The check before a measurement finds schedules that give wrong results."""

from __future__ import annotations

import math

import pytest
import torch
import tvm

from tests.records.planted import record_of, right, softmax_task, wrong
from tvmbridge.records import Task
from tvmbridge.schedules.target import host_target
from tvmbridge.tuning import measure
from tvmbridge.tuning.measure import disagreement, sample_inputs


@pytest.fixture(scope="module")
def task() -> Task:
    found = softmax_task()
    with torch.no_grad():
        assert min(measure.set_up(tvm.ir.save_json(found.mod), str(host_target()))) > 0
    torch.set_grad_enabled(True)
    return found


def scheduled(task: Task, steps: object) -> str:
    schedule = tvm.s_tir.Schedule(task.mod)
    steps(schedule)  # type: ignore[operator]
    return tvm.ir.save_json(schedule.mod)


def test_a_right_schedule_is_measured(task: Task) -> None:
    assert all(0 < seconds < 1 for seconds in measure.measure(scheduled(task, right)))


def test_a_wrong_schedule_is_refused(task: Task) -> None:
    with pytest.raises(measure.WrongResultError):
        measure.measure(scheduled(task, wrong))


def test_a_race_leaves_wrong_and_unusable_records_out(task: Task) -> None:
    traces = [record_of(task, steps, 1.0).trace for steps in (wrong, right)]
    rule, first, second, third = measure.race([*traces, ["no trace"]])
    assert rule is not None
    assert second is not None
    assert (first, third) == (None, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_disagreement_lets_rounding_pass_and_nothing_else(dtype: torch.dtype) -> None:
    expected = torch.randn(100).to(dtype)
    expected[3], expected[4] = math.nan, math.inf
    rounding = expected * (1 + torch.finfo(dtype).eps)
    assert disagreement(rounding, expected) is None
    for index, value in ((0, 9.0), (0, math.nan), (3, 0.0), (3, math.inf), (4, -math.inf)):
        changed = expected.clone()
        changed[index] = value
        assert disagreement(changed, expected) is not None
    assert disagreement(torch.full_like(expected, math.nan), expected) is not None


def test_integers_and_bools_must_be_equal() -> None:
    numbers = torch.arange(5)
    assert disagreement(numbers, numbers) is None
    assert "Mismatched elements: 5 / 5" in str(disagreement(numbers + 1, numbers))
    flags = numbers > 2
    assert disagreement(flags, flags) is None
    assert disagreement(~flags, flags) is not None


def test_samples_have_special_values_and_indices_that_any_tensor_allows() -> None:
    types = [((64, 8), torch.float32), ((3, 64), torch.int64), ((64,), torch.bool)]
    usual, positive, special = sample_inputs(types)
    assert usual[0].isfinite().all()
    assert (positive[0] > 0).all()
    assert special[0].isnan().any()
    assert special[0].isinf().any()
    for tensors in (usual, positive, special):
        assert 0 <= int(tensors[1].min()) <= int(tensors[1].max()) < 3
        assert tensors[2].dtype is torch.bool

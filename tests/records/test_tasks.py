"""The tuning tasks of a module: equal functions give one task with the number of calls."""

from __future__ import annotations

import torch
from torch import nn

from tvmbridge import CompileOptions
from tvmbridge.records import count_tasks
from tvmbridge.records.apply import Coverage
from tvmbridge.records.tasks import Task, parse_workload
from tvmbridge.tuning.api import module_tasks


def tasks_of(module: nn.Module, x: torch.Tensor) -> tuple[dict[Task, int], int]:
    tasks, external, _ = module_tasks(module, (x,), {}, target=None, options=CompileOptions())
    return tasks, external


def test_equal_layers_are_one_task() -> None:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for _ in range(3)]
    tasks, external = tasks_of(nn.Sequential(*layers).eval(), torch.randn(4, 32))
    assert list(tasks.values()) == [3]
    assert external == 3


def test_train_mode_has_the_tasks_of_backward_too() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.GELU())
    forward, _ = tasks_of(module.eval(), torch.randn(4, 32))
    both, external = tasks_of(module.train(), torch.randn(4, 32))
    assert len(both) > len(forward)
    assert external > 1
    frozen, _ = tasks_of(module.requires_grad_(False), torch.randn(4, 32))
    assert len(frozen) == len(forward)


def test_a_task_survives_its_json() -> None:
    (task,), _ = tasks_of(nn.LayerNorm(32).eval(), torch.randn(4, 32))
    assert parse_workload(task.workload[1]) == task
    assert list(count_tasks(task.mod).values()) == [1]
    assert task.label.endswith("4x32")


def test_coverage_names_what_there_is() -> None:
    assert str(Coverage(1, 2, 0, 3)) == "1 tuned, 2 by rule, 3 external"
    assert str(Coverage(1, 2, 4, 3)) == "1 tuned, 2 by rule, 3 external, 4 plain"

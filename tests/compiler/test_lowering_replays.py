"""Forward is replayed before inference only if the observation leaves a question open."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge.compiler import lowering
from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.options import CompileOptions
from tvmbridge.differentiation.rehearsal import Rehearsal


class Unread(nn.Module):
    """Draws numbers that nothing reads: they change the next draws of the program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return x * 2


class Written(nn.Module):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * 2


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Rehearsal]:
    """Return a list that receives each rehearsal that is replayed for its draws."""
    found: list[Rehearsal] = []
    genuine = lowering.refuse_other_draws

    def noted(rehearsal: Rehearsal) -> None:
        found.append(rehearsal)
        genuine(rehearsal)

    monkeypatch.setattr(lowering, "refuse_other_draws", noted)
    return found


def _lower(module: nn.Module) -> None:
    lower_module(CompileRequest(module, (torch.randn(2, 4),), {}, False, CompileOptions()))


def test_forward_without_draws_is_not_replayed(replays: list[Rehearsal]) -> None:
    _lower(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval())
    assert not replays


@pytest.mark.parametrize("module", [Written(), Unread(), nn.RReLU(), nn.Dropout(0.5)])
def test_other_forwards_are_replayed(module: nn.Module, replays: list[Rehearsal]) -> None:
    _lower(module.train())
    assert len(replays) == 1

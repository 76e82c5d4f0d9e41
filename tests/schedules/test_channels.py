"""Images with values by channel: all cores compute, and vector loads are contiguous."""

from __future__ import annotations

import copy

import pytest
import torch
import tvm
from torch import nn

from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report, schedules


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the text of the scheduled functions for two cores, in the order of compilation."""
    found: list[str] = []
    genuine = schedules.schedule_function

    def noted(func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> tvm.tirx.PrimFunc | None:
        result = genuine(func, target)
        found.append("" if result is None else result.script(show_meta=False))
        return result

    monkeypatch.setattr(schedules, "schedule_function", noted)
    monkeypatch.setattr("tvmbridge.schedules.machine.core_count", lambda target: 2)
    monkeypatch.setenv("TVMBRIDGE_CACHE", "0")
    return found


PLANES = [(56, 56), (14, 14), (7, 7), (9, 11), (1, 13), (3, 3)]


@pytest.mark.parametrize("extents", [(56, 56), (28, 20)])
def test_a_norm_in_evaluation(extents: tuple[int, int], scheduled: list[str]) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()).eval()
    x = torch.randn(4, 64, *extents)
    with torch.no_grad():
        ours = add_tvm_dispatch(copy.deepcopy(eager), x)
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-6, atol=1e-6)
    assert dispatch_report(ours).tvm_calls == 1
    (text,) = [t for t in scheduled if f"T.int64({extents[0]})" in t]
    assert "T.parallel" in text
    # With ``%`` and ``//`` in one index the elements of a vector would be loaded one by one.
    loads = [line for line in text.splitlines() if "= input[" in line]
    assert loads
    assert not any("%" in line and "//" in line for line in loads), loads


class Norms(nn.Module):
    """A norm by channels and an activation for each input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        norms = (nn.Sequential(nn.BatchNorm2d(5), nn.Tanh()) for _ in range(count))
        self.norms = nn.ModuleList(norms)

    def forward(self, *images: torch.Tensor) -> list[torch.Tensor]:
        return [norm(x) for norm, x in zip(self.norms, images, strict=True)]


@pytest.mark.parametrize("batch", but_slow([1, 3, 4], 1, 3))
def test_a_norm_in_training(batch: int) -> None:
    planes = PLANES[batch % 2 :: 2]
    eager = Norms(len(planes)).double().train()
    mine = [torch.randn(batch, 5, *p, dtype=torch.float64, requires_grad=True) for p in planes]
    theirs = [x.detach().clone().requires_grad_() for x in mine]
    ours = add_tvm_dispatch(copy.deepcopy(eager), tuple(mine))
    for module, images in ((ours, mine), (eager, theirs)):
        sum(y.sin().sum() for y in module(*images)).backward()
    assert dispatch_report(ours).tvm_calls == 1
    pairs = zip([*mine, *ours.parameters()], [*theirs, *eager.parameters()], strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10)
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_sums_of_pictures_read_vectors_in_one_piece(scheduled: list[str]) -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum((0, 2, 3))

    x = torch.randn(4, 16, 28, 28)
    ours = add_tvm_dispatch(Sums(), x)
    torch.testing.assert_close(ours(x), x.double().sum((0, 2, 3)).float(), rtol=1e-5, atol=1e-5)
    (text,) = [t for t in scheduled if "T.int64(28)" in t]
    (load,) = [line for line in text.splitlines() if "T.let" in line and " = x[" in line]
    assert "+ i_3]" in load, load
    assert "T.int64(28)" not in load, load

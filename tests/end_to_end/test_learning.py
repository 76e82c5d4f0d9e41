"""Training with changing ``requires_grad`` flags, of modules dispatched with plain samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def _rows(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, dtype=torch.float64)


def _gan() -> tuple[nn.Module, nn.Module]:
    """Return a generator, and a discriminator with dropout."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    return generator.double(), judge.double()


def _train_gan(generator: nn.Module, judge: nn.Module, steps: int) -> list[Any]:
    """Train in turns: the discriminator, then the generator with the discriminator frozen."""
    torch.manual_seed(1)
    made_by, judged_by = (torch.optim.Adam(m.parameters(), 1e-2) for m in (generator, judge))
    seen: list[Any] = []
    for _ in range(steps):
        real, seeds = _rows(5, 6), _rows(5, 4)
        judge.requires_grad_(True)
        judged_by.zero_grad()
        loss = nn.functional.softplus(-judge(real)).mean()
        loss = loss + nn.functional.softplus(judge(generator(seeds).detach())).mean()
        loss.backward()
        judged_by.step()
        judge.requires_grad_(False)
        made_by.zero_grad()
        fooled = nn.functional.softplus(-judge(generator(seeds))).mean()
        fooled.backward()
        made_by.step()
        seen += [loss.detach(), fooled.detach(), *(p.grad for p in generator.parameters())]
    return [*seen, generator.state_dict(), judge.state_dict(), torch.get_rng_state()]


def test_a_judge_that_is_frozen_for_every_other_step(compilations: list[str]) -> None:
    plain, ours = _gan(), _gan()
    for module, width in zip(ours, (4, 6), strict=True):
        add_tvm_dispatch(module, _rows(5, width))
    assert len(compilations) == 2
    found, expected = _train_gan(*ours, steps=4), _train_gan(*plain, steps=4)
    torch.testing.assert_close(found, expected, **CLOSE)
    # One more compilation: the frozen discriminator in the generator's first step.
    assert len(compilations) == 3
    generator, judge = map(dispatch_report, ours)
    assert (generator.tvm_calls, generator.fallbacks) == (8, {})
    assert (judge.tvm_calls, judge.fallbacks) == (12, {})
    assert [len(s.gradients) for s in judge.specializations] == [1, 4]
    assert "gradients of 1 tensors in 4 calls" in str(judge)

"""Frozen parameters that forward updates, such as a teacher's, are handled like buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.runtime.test_dispatch import eager
from tvmbridge import UnsupportedOperatorError, add_tvm_dispatch, dispatch_report


class Taught(nn.Module):
    """A teacher follows a student: its weight by in-place writes, its bias by ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4, dtype=torch.float64)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
            self.teacher.bias.data.copy_(self.student.bias.data * 0.5)
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()  # type: ignore[no-any-return]


def test_a_teacher_follows_its_student_as_in_eager_pytorch() -> None:
    plain = Taught().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), torch.randn(3, 4, dtype=torch.float64))
    optimizers = [torch.optim.SGD(m.student.parameters(), lr=0.3) for m in (module, plain)]
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        found = []
        for called, optimizer in zip((module, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = called(x)
            loss.backward()
            optimizer.step()
            found.append([loss, called.state_dict(), [p.grad for p in called.parameters()]])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})
    # A teacher that requires gradients is not handled like buffers.
    module.teacher.requires_grad_()
    theirs = eager(module)
    for _ in range(2):
        torch.testing.assert_close(module(x), theirs(x))
    ((reason, count),) = dispatch_report(module).fallbacks.items()
    assert ("writes into the parameter teacher.bias" in reason, count) == (True, 2)
    with pytest.raises(UnsupportedOperatorError, match=r"the parameter teacher.bias; compiled"):
        add_tvm_dispatch(Taught().requires_grad_(), torch.randn(3, 4, dtype=torch.float64))

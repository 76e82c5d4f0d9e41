"""Arrays of numpy among the arguments: forward makes tensors of them, and parts have the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tvmbridge import add_tvm_dispatch, dispatch_report


class _Policy(nn.Module):
    """An agent as scripts of reinforcement learning have it: observations are arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.action, self.value = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, observed: Any) -> tuple[Tensor, Tensor]:
        x = torch.as_tensor(observed, dtype=torch.float64)
        y = torch.tanh(self.hidden(x) * 2 + 1)
        return self.action(y).log_softmax(-1), self.value(y)


def _steps(dispatched: bool, tensors_first: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model, draws = _Policy().double(), np.random.RandomState(0)
    if dispatched:
        add_tvm_dispatch(model)
    results = []
    for number in range(8):
        observed: Any = draws.randn(5, 4)
        if tensors_first and number < 3:
            observed = torch.from_numpy(observed)
        actions, value = model(observed)
        model.zero_grad()
        (value.square().mean() - actions[:, 0].mean()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results += [actions.detach(), value.detach(), *gradients]
    return results, dispatch_report(model) if dispatched else None


@pytest.mark.parametrize("tensors_first", [False, True])
def test_arrays_are_served_in_parts(tensors_first: bool) -> None:
    expected, _ = _steps(False, tensors_first)
    found, report = _steps(True, tensors_first)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert report.share == 1
    assert report.cut == "an argument is an array of numpy: argument `observed`: a ndarray"
    assert len(report.specializations) == tensors_first

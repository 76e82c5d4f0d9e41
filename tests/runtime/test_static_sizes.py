"""Code for any size of modules whose static sizes are also sizes that calls have."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime import sized_code
from tvmbridge.symbolic.sizes import DifferentCodeError


class Classes(nn.Module):
    """Two ranges: of the rows, and of the classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.linear, self.classes = nn.Linear(6, classes), classes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.linear(x).log_softmax(-1)
        rows, classes = torch.arange(x.shape[0]), torch.arange(self.classes)
        weighed = scores * (classes + 1.0) + rows.cos()[:, None]
        return weighed, weighed[rows, rows % self.classes].mean()


def _check(module: Classes, reference: Classes, rows: int) -> None:
    x = torch.randn(rows, 6)
    scores, loss = module(x)
    expected = reference(x.double())
    torch.testing.assert_close((scores.double(), loss.double()), expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, module.linear.weight)
    (wanted,) = torch.autograd.grad(expected[1], reference.linear.weight)
    torch.testing.assert_close(gradient.double(), wanted, atol=1e-5, rtol=1e-5)


# Two classes, the least size of a symbol, are in quick tests.
@pytest.mark.parametrize("classes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_batch_may_have_as_many_rows_as_there_are_classes(classes: int) -> None:
    module = Classes(classes)
    reference = copy.deepcopy(module).double()
    add_tvm_dispatch(module, torch.randn(8, 6), dynamic_shapes="auto")
    for rows in (8, 6, classes, 12, 4):
        _check(module, reference, rows)
    report = dispatch_report(module)
    assert report.tvm_calls == 5, report


def test_code_that_differs_is_compiled_at_other_points(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, tried = sized_code.compile_symbolic, list[Any]()

    @functools.wraps(compile_)
    def refused_once(module: nn.Module, sample_at: Any, points: Any, **options: Any) -> Any:
        tried.append(points)
        if len(tried) == 1:
            raise DifferentCodeError("a list has [4, 4, 3] elements")
        return compile_(module, sample_at, points, **options)

    monkeypatch.setattr(sized_code, "compile_symbolic", refused_once)
    torch.manual_seed(0)
    module = Classes(3)
    reference = copy.deepcopy(module).double()
    add_tvm_dispatch(module, torch.randn(8, 6), dynamic_shapes="auto")
    for rows in (8, 9):
        _check(module, reference, rows)
    assert dispatch_report(module).tvm_calls == 2
    first, second = ({n for point in points.all for n in point} for points in tried)
    assert first.isdisjoint(second)

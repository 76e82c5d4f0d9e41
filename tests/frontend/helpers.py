"""How the frontend's tests run a function through the whole way of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tvmbridge
from tests.conformance.compare import compare
from tvmbridge.report import DispatchReport


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def run(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, DispatchReport]:
    """The result of the compiled ``function``, and the report of its dispatch."""
    module = Function(function).eval()
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, inputs)
        result = module(*inputs)
    report = tvmbridge.dispatch_report(module)
    assert report.tvm_calls == 1
    assert not report.fallbacks
    return result, report


def assert_like_eager(function: Callable[..., Any], *inputs: torch.Tensor) -> DispatchReport:
    """Assert that the compiled ``function`` agrees with PyTorch in structure, dtype and values."""
    with torch.no_grad():
        expected = function(*[t.clone() for t in inputs])
    result, report = run(function, *inputs)
    difference = compare(result, expected, values=True)
    assert difference is None, difference
    return report

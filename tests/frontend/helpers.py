"""Helpers that compile a function by the whole pipeline and compare it with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import tvmbridge
from tests.conformance.compare import compare
from tvmbridge.core.errors import BridgeError
from tvmbridge.report import DispatchReport

# By name: a function, and the tensors that it is called with.
Cases = Mapping[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]

NAN, INF = float("nan"), float("inf")
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, 1.5, 6.5, 1e-6, -1e-6, 80.0, -80.0]


def special(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return 16 numbers that are hard for many functions: signed zeros, halves, infinities, NaN."""
    return torch.tensor(SPECIAL, dtype=dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(dtype)


class Function(nn.Module):
    """A module that calls a function of tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def run(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, DispatchReport]:
    """Compile and call ``function``; return its result and the dispatch report."""
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


class Together:
    """Cases that are compiled as one module, because one compilation is faster than many.

    Cases share no inputs, so that no kernel fuses two cases. If the module cannot be compiled,
    each case is compiled separately, and only the faulty case fails. ``report`` is the module's
    report, or None before a case has run.
    """

    def __init__(self, cases: Cases) -> None:
        self._cases = dict(cases)
        self._results: dict[str, Any] | None = None
        self.report: DispatchReport | None = None

    def assert_like_eager(self, name: str) -> None:
        """Assert that the case ``name`` agrees with PyTorch in structure, dtype and values."""
        function, inputs = self._cases[name]
        if self._results is None:
            self._results = self._run()
        if name not in self._results:
            assert_like_eager(function, *inputs)
            raise AssertionError(f"{name} is right by itself, but not compiled with the others")
        with torch.no_grad():
            expected = function(*[t.clone() for t in inputs])
        difference = compare(self._results[name], expected, values=True)
        assert difference is None, difference

    def _run(self) -> dict[str, Any]:
        def calls(*tensors: torch.Tensor) -> list[Any]:
            rest = iter(tensors)
            return [f(*[next(rest) for _ in inputs]) for f, inputs in self._cases.values()]

        # Keep strides and alignment of the inputs; copy only those that share memory.
        seen: set[int] = set()
        inputs: list[torch.Tensor] = []
        for _, tensors in self._cases.values():
            for tensor in tensors:
                storage = tensor.untyped_storage().data_ptr()
                inputs.append(_copy(tensor) if storage in seen else tensor)
                seen.add(storage)
        try:
            results, self.report = run(calls, *inputs)
        except (BridgeError, AssertionError, RuntimeError):
            return {}
        return dict(zip(self._cases, results, strict=True))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and storage offset, in a new storage."""
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

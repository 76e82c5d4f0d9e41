"""Attributes that forward assigns before it reads them are no state, and end up as in eager."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


class Structure(nn.Module):
    """Stores numbers of the last call in attributes, as Funnel Transformer's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Any = None
        self.offset = 1.0
        self.kind: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor = 1
        self.size, self.dtype = (tuple(x.shape), "rows"), x.dtype
        for _ in range(x.shape[0]):
            self.factor *= 2
        if self.kind is None:
            self.kind = "first"
        return x * self.factor + self.offset * self.size[0][1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.structure = Structure()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.structure(x) * self.weight


def _left(module: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(module.structure).items() if n[0] != "_"}


def test_what_forward_assigns_first_is_assigned_at_each_call() -> None:
    plain: Any = Model().eval()
    plain.structure.kind = "given"
    module = copy.deepcopy(plain)
    small, large = torch.randn(2, 4), torch.randn(3, 4)
    for x in (small, large):
        add_tvm_dispatch(module, x)
    assert module.structure.factor is None
    twin = copy.deepcopy(module)
    for served in (module, twin):
        for x in (small, large, small):
            torch.testing.assert_close(served(x), plain(x))
            assert _left(served) == _left(plain)
        report = dispatch_report(served)
        assert (report.tvm_calls, report.fallbacks) == (3, {})
    module.structure.factor = "overwritten"
    torch.testing.assert_close(module(small), plain(small))
    assert _left(module) == _left(plain)
    assert dispatch_report(module).tvm_calls == 4
    plain.structure.offset = module.structure.offset = 2.0
    torch.testing.assert_close(module(large), plain(large))
    assert dispatch_report(module).fallbacks == {"the attribute structure.offset changed": 1}


def test_what_forward_reads_first_must_be_in_place() -> None:
    module: Any = add_tvm_dispatch(Model().eval(), torch.randn(2, 4))
    for _ in range(2):
        module(torch.randn(2, 4))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (1, {"the attribute structure.kind changed": 1})
    assert module.structure.kind == "first"


class Traced(nn.Module):
    """Assigns an attribute whose value in a trace differs from its value in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.traced = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.traced = torch.compiler.is_compiling()
        return x * 2


def test_what_a_trace_assigns_otherwise_is_that_of_a_call() -> None:
    x, module = torch.randn(2), add_tvm_dispatch(Traced(), torch.randn(2))
    for _ in range(2):
        module.traced = True
        torch.testing.assert_close(module(x), x * 2)
        assert module.traced is False
    assert dispatch_report(module).fallbacks == {}

"""Tensors marked by ``mark_dynamic`` work as samples like others, and keep their marks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report, optimize_fx


def _marks(tensor: torch.Tensor) -> dict[str, object]:
    return {name: repr(value) for name, value in vars(tensor).items()}


def test_marked_sample_is_served() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    expected, before = module(x), _marks(x)
    add_tvm_dispatch(module, x, on_fallback="raise")
    torch.testing.assert_close(module(x), expected)
    assert dispatch_report(module).tvm_calls == 1
    assert _marks(x) == before


def test_refused_trace_leaves_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    monkeypatch.setattr(torch.export, "export", _failing_inside)
    with pytest.raises(CaptureError, match="cannot trace"):
        optimize_fx(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x)
    assert _marks(x) == {}


def _failing_inside(_: object, args: tuple[torch.Tensor, ...], *__: object, **___: object) -> None:
    torch._dynamo.maybe_mark_dynamic(args[0], 0)
    raise ValueError("a trace that fails")

"""Code for any size where forward relates sizes: one symbol stands for both, or none for one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.frontend.helpers import Function
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report


class Grows(nn.Module):
    """A module whose mask is one row longer than its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, cache: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.cat([cache, cache[:1]]) + mask) @ self.weight


@torch.no_grad()
def test_every_call_is_served() -> None:
    torch.manual_seed(0)
    eager = Grows().eval()
    module = copy.deepcopy(eager)
    calls = [(torch.randn(n, 6), torch.randn(n + 1, 6)) for n in (7, 9, 12, 31)]
    add_tvm_dispatch(module, calls[0], dynamic_shapes="auto")
    for call in calls:
        torch.testing.assert_close(module(*call), eager(*call))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (len(calls), {})


def _looped(x: torch.Tensor) -> torch.Tensor:
    """Run a loop over the steps of a sequence, whose number is then no symbol."""
    state = torch.zeros_like(x[:, 0])
    for step in range(x.shape[1]):
        state = torch.tanh(state + x[:, step])
    return state


# Several calls have sizes of 1 and equal sizes, which are no sizes of a trace.
_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "a mask for two arguments": (
        lambda a, b, mask: torch.cat([a, b], 1) * mask,
        lambda n, m: (torch.randn(2, n, 3), torch.randn(2, m, 3), torch.randn(2, n + m, 1)),
        [(7, 4), (5, 2), (6, 3), (3, 3), (9, 20), (1, 4)],
    ),
    "a mask for half of the places": (
        lambda x, mask: functional.max_pool1d(x, 3, 2, 1) * mask,
        lambda n: (torch.randn(2, 3, n), torch.randn(2, 1, (n + 1) // 2)),
        [(7,), (12,), (3,), (31,)],
    ),
    "at most as many rows": (
        lambda x, y: x[: y.shape[0]] * 2 + y,
        lambda n, m: (torch.randn(n, 3), torch.randn(m, 3)),
        [(16, 8), (19, 5), (12, 7), (9, 3), (30, 29), (16, 1)],
    ),
    "a loop over one size": (
        _looped,
        lambda b, n: (torch.randn(b, n, 3),),
        [(4, 3), (5, 3), (6, 2), (2, 3), (7, 2), (9, 2)],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", but_slow(_FORMS, "a loop over one size"))
def test_calls_with_sizes_that_depend_on_others_are_served(name: str) -> None:
    forward, arguments, sizes = _FORMS[name]
    torch.manual_seed(0)
    module, eager = Function(forward), Function(forward)
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    for size in sizes:
        call = arguments(*size)
        torch.testing.assert_close(module(*call), eager(*call))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (len(sizes), {})

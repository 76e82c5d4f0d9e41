"""Forwards that an eager epilogue cannot reproduce are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.frontend.helpers import Function
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch
from tvmbridge.core.errors import BridgeError, CaptureError, UnsupportedOperatorError
from tvmbridge.graph_capture.capture import capture


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum().item() > 0 else x


def _type(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x > 0]
    return chosen if isinstance(chosen, torch.Tensor) else x


def _added(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x > 0]
    chosen += 1
    return chosen


def _written_later(x: torch.Tensor) -> Any:
    y = x * 2
    chosen = y[y > 0]
    y.add_(1)
    return chosen, y


def _stored(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0] = x.sum().item()
    return y


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        chosen = x[x > 0]
    return x.sum() + chosen


def _long(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x > 0]
    for _ in range(100):
        chosen = chosen + 1
    return chosen


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x[x[:, 0] > 0] @ x.t()


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a branch": (_branch, "branches by .*the result of a comparison, at .*in _branch.*torch.where"),
    "the type": (
        _type,
        "size or number depends on data, the result of an index that is a mask.*fixed",
    ),
    "an augmented assignment": (_added, "in place"),
    "a method in place": (lambda x: x[x > 0].add_(1), "calls add_ .*in place"),
    "a write before the epilogue": (_written_later, "has read"),
    "a number put into a tensor": (_stored, "__setitem__.*in place"),
    "dropout": (lambda x: functional.dropout(x[x > 0]), "random"),
    "another gradient mode": (_without_gradient, "gradient mode"),
    "much": (_long, "more than 64"),
    "autocast": (_autocast, "autocast"),
    "a loop": (lambda x: sum(row for row in x[x > 0]), "loops over"),
    "a number": (lambda x: x * len(x[x > 0]), "Python number"),
    "a size": (
        lambda x: torch.zeros(x.long().unique().shape[0]),
        "must be known.*torch.where",
    ),
}


@pytest.mark.parametrize("name", thinned(REFUSED, 2))
def test_what_a_tail_cannot_repeat_is_refused_by_name(name: str) -> None:
    forward, reason = REFUSED[name]
    with pytest.raises((CaptureError, UnsupportedOperatorError), match=f"(?s){reason}"):
        capture(Function(forward), torch.randn(4, 4).requires_grad_(), needs_grad=True)


class Normed(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        return functional.batch_norm(x[x[:, 0] > 0], mean, var, training=True)


def test_statistics_that_the_tail_would_move_are_refused_and_stay() -> None:
    module = Normed(3)
    with torch.no_grad(), pytest.raises(BridgeError, match="writes into a tensor"):
        add_tvm_dispatch(module, torch.ones(4, 3))
    assert torch.equal(module.running_mean, torch.zeros(3))

"""Tensors in containers of a class: they are inputs of compiled code, and replacements are seen."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import add_tvm_dispatch, dispatch_report


class Base(nn.Module):
    tables: dict[str, Any]
    rows: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Scaled(Base):
    """Reads tensors in containers of its parent class, beside an object that has no copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.tables["scale"] + self.rows[0]


def _write(values: torch.Tensor) -> None:
    values.data.mul_(3)


def _replace(values: torch.Tensor) -> None:
    Base.tables["scale"] = values * 5


@pytest.mark.parametrize(("change", "calls"), [(_write, 2), (_replace, 1)])
def test_tensors_in_containers_of_a_class(
    change: Callable[[torch.Tensor], None], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = torch.full((4,), 2.0)
    tables = {"scale": scale, "lock": threading.Lock()}
    monkeypatch.setattr(Base, "tables", tables, raising=False)
    monkeypatch.setattr(Base, "rows", [torch.ones(4)], raising=False)
    module = Scaled().eval()
    x = torch.randn(2, 4)
    add_tvm_dispatch(module, x)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(module(x), eager(module)(x))
        assert dispatch_report(module).tvm_calls in (1, calls)
        change(scale)
    assert dispatch_report(module).tvm_calls == calls


def test_copies_of_a_module_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "tables", {"scale": torch.ones(4)}, raising=False)
    monkeypatch.setattr(Base, "rows", [torch.ones(4)], raising=False)
    module = Scaled().eval()
    x = torch.randn(2, 4)
    copied = copy.deepcopy(add_tvm_dispatch(module, x))
    with torch.no_grad():
        torch.testing.assert_close(copied(x), eager(module)(x))
    assert dispatch_report(copied).tvm_calls == 1

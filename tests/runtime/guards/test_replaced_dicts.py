"""Modules that get other dictionaries of submodules, parameters or hooks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report


def _last_removed(module: Any) -> None:
    del module[-1]  # renames the other submodules, in a new dictionary


def _submodules(module: Any) -> None:
    module._modules = dict(module._modules)


def _parameters(module: Any) -> None:
    module[0]._parameters = dict(module[0]._parameters)


def _hooks(module: Any) -> None:
    module[0]._forward_hooks = OrderedDict()


def _other_layer(module: Any) -> None:
    module[0] = nn.Linear(4, 4)


def _other_weight(module: Any) -> None:
    module[0].weight = nn.Parameter(torch.ones(4, 4))


def _hooked(module: Any) -> None:
    module[0].register_forward_hook(lambda owner, given, result: result * 2)


@pytest.mark.parametrize(
    ("replace", "change"),
    thinned(
        [
            (_last_removed, _other_layer),
            (_submodules, _other_layer),
            (_parameters, _other_weight),
            (_hooks, _hooked),
        ],
        2,
    ),
)
def test_calls_follow_a_module_with_other_dictionaries(
    replace: Callable[[Any], None], change: Callable[[Any], None]
) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4)
    add_tvm_dispatch(module, on_fallback="silent")
    for step in (lambda _: None, replace, change):
        step(module)
        for _ in range(3):
            torch.testing.assert_close(module(x), eager(module)(x))
    assert dispatch_report(module).tvm_calls == 9


class _OfList(nn.Module):
    """Multiplies by a tensor in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.held = nn.Linear(4, 4), [torch.ones(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.held[0]


def test_a_copy_with_other_dictionaries_reads_its_own_tensors() -> None:
    module, x = _OfList(), torch.ones(2, 4)
    add_tvm_dispatch(module, x, on_fallback="silent")
    duplicate = copy.deepcopy(module)
    duplicate.held[0].mul_(3)
    duplicate._parameters = dict(duplicate._parameters)
    torch.testing.assert_close(duplicate(x), 3 * module(x))
    assert dispatch_report(duplicate).tvm_calls == 1

"""Private names by which PyTorch compares tensors and state for tvmbridge's guards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from .checks import PrivateName, within, zero_tensor


def _compares_tensors(kind: Any) -> bool:
    x = torch.ones(2, 3)
    guards = kind(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    others = (
        torch.ones(2, 4),
        torch.ones(3, 2).t(),
        x.double(),
        x.clone().requires_grad_(),
        nn.Parameter(x, requires_grad=False),
        x.to_sparse(),
        x.to("meta"),
        zero_tensor(2, 3),
        torch._neg_view(x),
        within(torch.inference_mode(), x.clone),
        None,
    )
    inferring = within(torch.inference_mode(), lambda: guards.check(x))
    return guards.check(x.clone()) and not inferring and not any(map(guards.check, others))


def _may_ignore_strides(kind: Any) -> bool:
    x = torch.ones(2, 3)
    guards = kind(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[None, None]])
    return guards.check(torch.ones(3, 2).t()) and _compares_tensors(kind)


def _compares_state(kind: Any) -> bool:
    grad_mode = torch.no_grad() if torch.is_grad_enabled() else torch.enable_grad()
    autocast = torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu"))
    others = [_stays(kind, mode) for mode in (grad_mode, autocast, _OtherDtype())]
    with torch.autocast("cpu", torch.bfloat16):
        dtypes_differ = not _stays(kind, torch.autocast("cpu", torch.float16))
    return _stays(kind, nullcontext()) and not any(others) and dtypes_differ


def _stays(kind: Any, context: Any) -> bool:
    return bool(within(context, kind().check))


class _OtherDtype:
    """A context manager in which the default dtype differs from the current one."""

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        double = self._before is torch.float64
        torch.set_default_dtype(torch.float32 if double else torch.float64)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before)


def _misses_storage(ask: Any) -> bool:
    seen: list[bool] = []

    def called(x: torch.Tensor) -> torch.Tensor:
        seen.append(ask(x))
        return x

    torch.func.vmap(called)(torch.ones(2))
    return ask(torch.ones(2)) and seen == [False]


GUARDS = (
    PrivateName(
        "torch._C._dynamo.guards.TensorGuards",
        "comparing the tensors of a call with those that code is compiled for",
        _may_ignore_strides,
    ),
    PrivateName(
        "torch._C._dynamo.guards.GlobalStateGuard",
        "comparing PyTorch's modes with those that code is compiled for",
        _compares_state,
    ),
    PrivateName(
        "torch._C._has_storage",
        "refusing tensors that a function transform has left behind",
        _misses_storage,
    ),
)

"""Surroundings: the modes of PyTorch that a call is made under, and whether they fit."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_C = torch._C


def refused_now() -> str | None:
    """Why compiled code must not run in the present context; None when it may."""
    if torch.compiler.is_compiling() or _C._get_tracing_state():
        return "the module is being traced"
    if _C._len_torch_dispatch_stack():
        return "a dispatch mode is active"
    if _C._functorch.peek_interpreter_stack() is not None:
        return "a function transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    return _mode_refuses() if _C._len_torch_function_stack() else None


def _mode_refuses() -> str | None:
    for index in range(_C._len_torch_function_stack()):
        mode = _C._get_function_stack_at(index)
        if not isinstance(mode, DeviceContext):
            return "a function mode is active"
        if mode.device.type != "cpu":
            return "another default device is set"
    return None

"""Private names for PyTorch's modes and other state of the calling thread."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

from .checks import PrivateName, takes, within

_ONE_MODE = BaseTorchFunctionMode


class _Functions(TorchFunctionMode):
    """A function mode that records each function called under it, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append((func, args))
        return func(*args, **(kwargs or {}))


def _goes_by(setter: Any) -> bool:
    enabled = torch.is_grad_enabled()
    with _Functions() as functions:
        torch.set_grad_enabled(enabled)
    return (setter, (enabled,)) in functions.called


def _hides_functions(context: Any) -> bool:
    with _Functions() as functions, context():
        torch.sin(torch.ones(2))
    return not functions.called


def _watches(kind: Any) -> bool:
    seen: list[Any] = []

    class Noting(kind):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    within(Noting(), lambda: torch.ones(2).sin())
    return torch.ops.aten.sin.default in seen


def _lists(ask: Any) -> bool:
    mode = BaseTorchDispatchMode()
    before = ask()
    with mode:
        return list(ask()) == [*before, mode]


def _disables(context: Any) -> bool:
    mode = BaseTorchDispatchMode()
    with mode, context():
        return torch._C._len_torch_dispatch_stack() == 0


def _counts(mode: AbstractContextManager[Any]) -> Any:
    return lambda count: within(mode, count) == count() + 1


def _finds(ask: Any) -> bool:
    with _ONE_MODE() as mode:
        return bool(ask(torch._C._len_torch_function_stack() - 1) is mode)


def _pops(pop: Any) -> bool:
    before = torch._C._len_torch_function_stack()
    mode = _ONE_MODE()
    mode.__enter__()
    return bool(pop() is mode and torch._C._len_torch_function_stack() == before)


def _is_entered(kind: Any) -> bool:
    device = torch.device("meta")
    with device:
        found = torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1)
        return isinstance(found, kind) and found.device == device


def _holds_default(context: Any) -> bool:
    before = getattr(context, "device_context", None)
    torch.set_default_device("meta")
    try:
        return bool(context.device_context.device.type == "meta")
    finally:
        torch.set_default_device(None if before is None else before.device)


def _sees_transform(ask: Any) -> bool:
    seen: list[Any] = []

    def called(x: torch.Tensor) -> torch.Tensor:
        seen.append(ask())
        return x

    torch.func.vmap(called)(torch.ones(2))
    return ask() is None and seen[0] is not None


def _switches_mkldnn(switch: Any) -> bool:
    before = torch.backends.mkldnn.enabled
    try:
        switch(not before)
        return bool(torch.backends.mkldnn.enabled is not before)
    finally:
        switch(before)


def _switches_cudnn(switch: Any) -> bool:
    before = torch.backends.cudnn.enabled
    try:
        switch(not before)
        return bool(torch.backends.cudnn.enabled is not before)
    finally:
        switch(before)


def _reads_precision(ask: Any) -> bool:
    return bool(ask("mkldnn", "matmul") in ("none", "ieee", "tf32", "bf16"))


MODES = (
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode", "watching which operators run", _watches
    ),
    PrivateName(
        "torch.utils._python_dispatch._disable_current_modes",
        "looking at real values in a trace",
        _disables,
    ),
    PrivateName(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "watching which of the user's functions run",
        _lists,
    ),
    PrivateName(
        "torch._C._len_torch_dispatch_stack",
        "leaving calls to eager PyTorch under a dispatch mode",
        _counts(BaseTorchDispatchMode()),
    ),
    PrivateName(
        "torch._C._len_torch_function_stack",
        "leaving calls to eager PyTorch under a function mode",
        _counts(_ONE_MODE()),
    ),
    PrivateName("torch._C._get_function_stack_at", "which function modes are active", _finds),
    PrivateName(
        "torch._C._pop_torch_function_stack", "leaving a mode that forward has entered", _pops
    ),
    PrivateName(
        "torch._C.DisableTorchFunction", "settings that are restored unwatched", _hides_functions
    ),
    PrivateName("torch.utils._device.DeviceContext", "a default device of a block", _is_entered),
    PrivateName("torch._GLOBAL_DEVICE_CONTEXT", "restoring the default device", _holds_default),
    PrivateName(
        "torch._C._get_tracing_state", "leaving calls to torch.jit.trace", lambda ask: not ask()
    ),
    PrivateName(
        "torch._C._functorch.peek_interpreter_stack",
        "leaving calls to function transforms",
        _sees_transform,
    ),
    PrivateName(
        "torch._C._InferenceMode",
        "a compilation without the caller's inference mode",
        lambda kind: within(kind(True), torch.is_inference_mode_enabled),
    ),
    PrivateName(
        "torch._C._DisablePythonDispatcher",
        "kernels that are run for real in a trace",
        lambda kind: within(kind(), lambda: True),
    ),
    PrivateName(
        "torch._C._get_mkldnn_enabled",
        "oneDNN's layers in a trace, which switches them off",
        lambda ask: ask() is torch.backends.mkldnn.enabled,
    ),
    PrivateName(
        "torch._C._set_mkldnn_enabled",
        "oneDNN's layers in a trace, which switches them off",
        _switches_mkldnn,
    ),
    PrivateName(
        "torch._C._set_cudnn_enabled",
        "switching cuDNN off in a trace, without a change of the precision",
        _switches_cudnn,
    ),
    PrivateName(
        "torch._C._get_fp32_precision_getter",
        "the precision of float32 products, compared at each call",
        _reads_precision,
    ),
    PrivateName(
        "torch._utils.is_compiling",
        "noticing that forward asks whether it is compiled",
        takes(),
    ),
    PrivateName(
        "torch._C._set_grad_enabled",
        "noticing that forward switches gradients on",
        _goes_by,
    ),
)

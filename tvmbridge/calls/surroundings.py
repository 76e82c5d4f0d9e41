"""The context in which a thread calls: tracing, modes, function transforms, checkpoints."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import (
    DeviceContext,
    dispatch_mode_count,
    function_mode_at,
    function_mode_count,
    innermost_transform,
    saved_tensors_hooks_in_force,
    tracing_state,
)
from tvmbridge.core.turns import another_compiles

_CHECKPOINTS = "torch.utils.checkpoint"
# The class whose hook receives the tensors that a recomputation saves.
_REPEATS = "_recomputation_hook"


def refused_now() -> Reason | None:
    """Return why compiled code must not run in the current context; None if it may."""
    if torch.compiler.is_compiling() and not _captured_elsewhere():
        return Reason(Kind.TRACED)
    if tracing_state():
        return Reason(Kind.TRACED)
    if dispatch_mode_count():
        return Reason(Kind.DISPATCH_MODE)
    if innermost_transform() is not None:
        return Reason(Kind.TRANSFORM)
    if forward_ad._current_level >= 0:
        return Reason(Kind.FORWARD_AD)
    return _mode_refuses() if function_mode_count() else None


def in_checkpoint() -> bool:
    """Whether the saved-tensor hooks of a non-reentrant checkpoint are active.

    Such a checkpoint recomputes the call in backward, and stops as soon as all tensors that it
    needs are saved again.
    """
    return _checkpoint_hook() is not None


def repeated_by_checkpoint() -> bool:
    """Whether this call is the recomputation of a non-reentrant checkpoint."""
    hook = _checkpoint_hook()
    return hook is not None and getattr(hook, "__qualname__", "").startswith(_REPEATS)


def _checkpoint_hook() -> object | None:
    hooks = saved_tensors_hooks_in_force(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != _CHECKPOINTS:
        return None
    return hooks[0]


def _captured_elsewhere() -> bool:
    """Whether TorchDynamo compiles in another thread; it sets the flag of all threads."""
    return another_compiles() or not torch.compiler.is_compiling()


def _mode_refuses() -> Reason | None:
    for index in range(function_mode_count()):
        mode = function_mode_at(index)
        if not isinstance(mode, DeviceContext):
            return Reason(Kind.FUNCTION_MODE)
        if mode.device.type != "cpu":
            return Reason(Kind.DEFAULT_DEVICE)
    return None

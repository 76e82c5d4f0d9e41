"""Calls of the module's own forward that native code passes on, without Python of a dispatcher."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.torch_private import saved_tensors_hooks_in_force
from tvmbridge.runtime.guards.watch import native_half

# Classes of arguments that native code compares by identity, and the most positional arguments.
_SINGLE = (type(None), bool, int, float, str)
_MOST_ARGUMENTS = 8

# The most objects of native code that pass on calls of one kind: calls that differ in more ways
# go through the dispatcher.
_MOST = 8


class NativeCalls:
    """Counts the calls of one kind that native code passes to the module's own forward."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    @property
    def calls(self) -> int:
        """Return the number of calls so far."""
        return sum(each.calls for each in self._made)

    @property
    def has_room(self) -> bool:
        """Whether another object may be added."""
        return len(self._made) < _MOST

    def add(self, native: Any) -> None:
        """Count the calls of ``native``, a result of :func:`native_aside`."""
        self._made.append(native)


def native_aside(
    module: nn.Module,
    own: Callable[..., Any] | None,
    arguments: Arguments,
    records: bool,
    of_any_size: bool = False,
) -> Any:
    """Return an object of native code that passes calls like this one to the module's own forward.

    Its attribute ``calls`` counts them. A call must have PyTorch's present modes, the module's mode
    of training, and the same kind of arguments. The module's tensors and attributes may change,
    because the own forward is right for any.

    Args:
        own: the forward that was set on the module's instance; None: its class's forward.
        records: whether autograd records the call; then calls inside a checkpoint are refused.
        of_any_size: whether tensors need only have about as many elements, and not equal sizes.

    Returns:
        The object; None if the call has other arguments than tensors and single values, or if the
        compiled half is missing.
    """
    args, kwargs = arguments
    function = own or inspect.getattr_static(type(module), "forward")
    native = native_half()
    if native is None or len(args) > _MOST_ARGUMENTS:
        return None
    if not all(type(a) in _SINGLE or isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        return None
    if own is None and type(function) is not types.FunctionType:
        return None
    hooks = saved_tensors_hooks_in_force if records else None
    holder = module if own is None else None
    given = holder, function, module.__dict__, args, kwargs, hooks, of_any_size
    try:
        return native.Aside(*given)
    except TypeError:  # a tensor without memory of its own
        return None

"""Forwards: which one a module has, which one its class, and whose call leads to one."""

from __future__ import annotations

import copy
import operator
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tvmbridge.core.contents import MISSING


class StandsForForward:
    """What is installed as an instance's ``forward`` and does the same.

    ``own`` is the forward that the instance had; None: it has that of its class.
    """

    own: Callable[..., Any] | None


class _Counting(StandsForForward):
    """Counts the references to what is called in the place of a module's forward."""

    own = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return sys.getrefcount(self)


def references_of_a_call() -> int:
    """How many there are to a dispatcher while its module is called, and it is in no copy."""
    module = nn.Module()
    module.__dict__["forward"] = _Counting()
    return int(module())


def stands_for(forward: Any) -> Any:
    """The forward in an instance's dict; a dispatcher counts as what it stands for."""
    if not isinstance(forward, StandsForForward):
        return forward
    return MISSING if forward.own is None else forward.own


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """The forward that the class of ``module`` has now, whatever the instance has."""
    for class_ in type(module).__mro__:
        if "forward" in class_.__dict__:
            found = class_.__dict__["forward"]
            return found.__get__(module, type(module)) if hasattr(found, "__get__") else found
    raise AttributeError(f"{type(module).__name__} has no forward")


def standing_behind(forward: Any) -> StandsForForward | None:
    """The one that ``forward`` is, or that a library has wrapped (accelerate's ``prepare``)."""
    while forward is not None and not isinstance(forward, StandsForForward):
        forward = getattr(forward, "__wrapped__", None)
    return forward


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that ``module`` would have without a dispatch."""
    installed = module.__dict__.get("forward")
    behind = standing_behind(installed)
    return original_forward(module, installed if behind is None else behind.own)


def rebound(
    original: Callable[..., Any], module: nn.Module, other: nn.Module, memo: dict[int, Any]
) -> Callable[..., Any]:
    """The ``original`` forward of ``module``, as that of ``other``, its deep copy."""
    if isinstance(original, types.MethodType) and original.__self__ is module:
        return types.MethodType(original.__func__, other)
    return copy.deepcopy(original, memo)


def original_forward(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """The forward that a dispatched ``module`` has where nothing is dispatched."""
    return own or forward_of_class(module)


def pickled_forward(module: nn.Module, own: Callable[..., Any] | None) -> tuple[Any, ...]:
    """What ``__reduce__`` of a dispatcher returns: ``module`` is pickled with its own forward.

    The functions are of Python's own, so that the pickle is read where tvmbridge is missing. When
    it is read, the module has no attributes yet: its forward is that of its class.
    """
    if own is None:
        return getattr, (module, "forward")
    return operator.getitem, ((own,), 0)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    yield from (within for within in code.co_consts if isinstance(within, types.CodeType))


# PyTorch's functions that call forward, which some do in a function within.
_CALLERS = frozenset(
    [*_codes(nn.Module._call_impl.__code__), *_codes(nn.Module._slow_forward.__code__)]
)


def calling_module(frame: types.FrameType) -> nn.Module | None:
    """The module whose call has led here; None where forward was called by itself.

    A shallow copy (``copy.copy``, a replica of DataParallel) has the same one in its ``__dict__``.
    """
    return frame.f_locals.get("self") if frame.f_code in _CALLERS else None


@contextmanager
def with_own_forward(module: nn.Module, own: Callable[..., Any] | None) -> Iterator[None]:
    """Within it the module has its own forward, so that capture traces that."""
    installed = module.__dict__.get("forward")
    try:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own
        yield
    finally:
        module.__dict__.pop("forward", None)
        if installed is not None:
            module.__dict__["forward"] = installed

"""Forwards: the forward of a module instance and of its class, and the module of a call."""

from __future__ import annotations

import copy
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tvmbridge.calls.standins import StandsForForward, wrapped_dispatcher
from tvmbridge.core.contents import MISSING


class _Counting(StandsForForward):
    """Returns the number of references to itself when it is called as a module's forward."""

    own = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return sys.getrefcount(self)


def references_of_a_call(counting: Callable[[], Any] = _Counting) -> int:
    """Return how many references a dispatcher has during a call, if no copy of the module has it.

    More references mean that a shallow copy of the module may hold the dispatcher as well.

    Args:
        counting: a class of objects that return the number of references to themselves.
    """
    module = nn.Module()
    module.__dict__["forward"] = counting()
    # nn.Module's own call would run the hooks that the user has registered for all modules.
    return int(_without_hooks(module))


def _without_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` with as many references to its forward as ``nn.Module._call_impl`` has."""
    forward_call = module.forward
    return forward_call(*args, **kwargs)


def stands_for(forward: Any) -> Any:
    """Return ``forward``; for a dispatcher, the forward that the instance had before it."""
    if not isinstance(forward, StandsForForward):
        return forward
    return MISSING if forward.own is None else forward.own


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the class of ``module``, bound to it; ignore the instance's forward.

    Raises:
        AttributeError: the class has no forward.
    """
    for class_ in type(module).__mro__:
        if "forward" in class_.__dict__:
            found = class_.__dict__["forward"]
            return found.__get__(module, type(module)) if hasattr(found, "__get__") else found
    raise AttributeError(f"{type(module).__name__} has no forward")


def forward_of_instance(module: nn.Module) -> Any:
    """Return the forward that is set on ``module``; None if there is none but that of its class.

    A pickle of a dispatched module sets the forward of the class.
    """
    held = module.__dict__.get("forward")
    is_bound = isinstance(held, types.MethodType) and held.__self__ is module
    return None if is_bound and held == forward_of_class(module) else held


def is_wrapped(module: nn.Module) -> bool:
    """Whether a library has wrapped the dispatcher of ``module``."""
    installed = module.__dict__.get("forward")
    return wrapped_dispatcher(installed) not in (None, installed)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward that ``module`` would have without its dispatcher."""
    installed = module.__dict__.get("forward")
    behind = wrapped_dispatcher(installed)
    return original_forward(module, installed if behind is None else behind.own)


def rebound(
    original: Callable[..., Any], module: nn.Module, other: nn.Module, memo: dict[int, Any]
) -> Callable[..., Any]:
    """Return the ``original`` forward of ``module`` for ``other``, its deep copy."""
    if isinstance(original, types.MethodType) and original.__self__ is module:
        return types.MethodType(original.__func__, other)
    return copy.deepcopy(original, memo)


def original_forward(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return ``own``, or the forward of the module's class if ``own`` is None."""
    return own or forward_of_class(module)


def pickled_forward(module: nn.Module, own: Callable[..., Any] | None) -> tuple[Any, ...]:
    """Return the value of a dispatcher's ``__reduce__``: it is pickled as the own forward.

    It names only functions of Python's library, so that the pickle can be read without tvmbridge.
    When the pickle is read, the module has no attributes yet: its forward is the class's.
    """
    if own is None:
        return getattr, (module, "forward")
    return operator.getitem, ((own,), 0)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    yield from (within for within in code.co_consts if isinstance(within, types.CodeType))


# The code of PyTorch's functions that call forward, and of functions nested in them.
_CALLERS = frozenset(
    [*_codes(nn.Module._call_impl.__code__), *_codes(nn.Module._slow_forward.__code__)]
)


def calling_module(frame: types.FrameType) -> nn.Module | None:
    """Return the module whose ``__call__`` runs in ``frame``; None if forward was called directly.

    A shallow copy (``copy.copy``, a replica of DataParallel) has the original's dispatcher in its
    ``__dict__``, so the module need not be the dispatched one.
    """
    return frame.f_locals.get("self") if frame.f_code in _CALLERS else None


@contextmanager
def with_own_forward(module: nn.Module, own: Callable[..., Any] | None) -> Iterator[None]:
    """Give the module its own forward inside this context, so that capture traces it.

    Calls in other threads wait for its end: the trace replaces the module's tensors.
    """
    held = module.__dict__
    kept: dict[str, Any] = {n: held[n] for n in ("forward", "_compiled_call_impl") if n in held}
    thread, ended = threading.get_ident(), threading.Event()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return (kept.get("_compiled_call_impl") or module._call_impl)(*args, **kwargs)
        ended.wait()
        return module(*args, **kwargs)

    try:
        held["_compiled_call_impl"] = call
        held.pop("forward", None)
        if own is not None:
            held["forward"] = own
        yield
    finally:
        for name in ("forward", "_compiled_call_impl"):
            held.pop(name, None)
        held.update(kept)
        ended.set()

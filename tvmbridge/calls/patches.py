"""Patch PyTorch's functions for one thread.

All threads share a patched attribute, and other threads may run models during a trace.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ClassMethodDescriptorType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar
from unittest import mock

from torch import nn

from tvmbridge.core.locks import Lock

_LOCK = Lock()


@dataclass
class _Installed:
    """A patched attribute.

    - ``genuine``: the original function
    - ``own``: the entry in the owner's ``__dict__`` before the patch; None if it was inherited
    - ``users``: the patches in force, in all threads
    - ``local``: the stack of replacements of each thread
    """

    genuine: Any
    own: Any
    users: set[Callable[..., Any]] = field(default_factory=set)
    local: threading.local = field(default_factory=threading.local)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        stack = getattr(self.local, "stack", None)
        if stack:
            return stack[-1](self.genuine, *args, **kwargs)
        return self.genuine(*args, **kwargs)


_INSTALLED: dict[tuple[int, str], _Installed] = {}


@contextmanager
def patched_here(
    owner: Any, name: str, replacement: Callable[..., Any], *, over: bool = False
) -> Iterator[Any]:
    """Replace calls of ``owner.name`` from this thread by ``replacement`` within the context.

    Yield the genuine function.

    Args:
        replacement: called with the genuine function first, then with the arguments. A class
            method of C that ``owner`` itself defines is called with the class first.
        over: whether ``replacement`` receives the thread's previous replacement, if it has one, in
            place of the genuine function.
    """
    before = _stack_here(owner, name)[-1:] if over else []
    # A new object, because replacements of several patches may be equal.
    user = partial(_called_over, before[0], replacement) if before else partial(replacement)
    try:
        installed = _install(owner, name, user)
        installed.local.__dict__.setdefault("stack", []).append(user)
        yield installed.genuine
    finally:
        # A signal handler may raise between any two calls, also in ``_release``.
        try:
            _release(owner, name, user)
        except BaseException:
            _release(owner, name, user)
            raise


def _called_over(
    before: Callable[..., Any],
    replacement: Callable[..., Any],
    genuine: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    return replacement(partial(before, genuine), *args, **kwargs)


def code_of_stubs() -> tuple[CodeType, ...]:
    """Return the code objects that run in all threads when a patched function is called."""
    stub = _calling(_Installed(None, None))
    return stub.__code__, _Installed.call.__code__


# The original code of the functions that ``answers_here`` has changed.
_OWN_CODE: dict[FunctionType, CodeType] = {}


def code_of(function: FunctionType) -> CodeType:
    """Return the original code of a function, even if :func:`answers_here` has replaced it."""
    return _OWN_CODE.get(function, function.__code__)


@contextmanager
def answers_here(*flags: Any) -> Iterator[None]:
    """Let the functions ``flags`` return False in other threads within the context.

    The functions take no arguments. Their code objects are replaced, so that every imported name
    of a function is affected.
    """
    thread, genuine = threading.get_ident(), [flag.__code__ for flag in flags]
    outermost = [flag for flag in flags if flag not in _OWN_CODE]
    _OWN_CODE.update((flag, flag.__code__) for flag in outermost)

    def answering(flag: FunctionType) -> Callable[[], bool]:
        ask = FunctionType(flag.__code__, flag.__globals__)
        return lambda: threading.get_ident() == thread and ask()

    for flag in flags:
        constants = (
            answering(flag) if each == _ANSWERS else each for each in _answer.__code__.co_consts
        )
        flag.__code__ = _answer.__code__.replace(co_consts=tuple(constants))
    try:
        yield
    finally:
        for flag, code in zip(flags, genuine, strict=True):
            flag.__code__ = code
        for flag in outermost:
            del _OWN_CODE[flag]


@contextmanager
def forward_patched_here(
    module: nn.Module, kind: type[nn.Module], replacement: Callable[..., Any]
) -> Iterator[None]:
    """Replace the forward of the class ``kind`` in this thread within the context.

    Args:
        module: the traced module. If a submodule holds the forward of ``kind`` as its own
            attribute, this attribute is replaced too.
    """
    with ExitStack() as stack:
        genuine = stack.enter_context(patched_here(kind, "forward", replacement))
        for owner in module.modules():
            own = owner.__dict__.get("forward")
            if isinstance(own, MethodType) and own.__func__ is genuine:
                bound = MethodType(partial(replacement, genuine), owner)
                stack.enter_context(mock.patch.dict(owner.__dict__, forward=bound))
        yield


# The patches that every trace of forward applies.
_TABLE: list[tuple[Any, str, Callable[..., Any]]] = []
_Replacement = TypeVar("_Replacement", bound=Callable[..., Any])


def patches(owner: Any, name: str) -> Callable[[_Replacement], _Replacement]:
    """Register the replacement of ``owner.name``, as in :func:`patched_here`, for every trace."""

    def enter(replacement: _Replacement) -> _Replacement:
        _TABLE.append((owner, name, replacement))
        return replacement

    return enter


@contextmanager
def table_patched_here(module: nn.Module) -> Iterator[None]:
    """Apply all registered replacements in this thread within the context."""
    with ExitStack() as stack:
        for owner, name, replacement in _TABLE:
            if name == "forward":
                stack.enter_context(forward_patched_here(module, owner, replacement))
            else:
                stack.enter_context(patched_here(owner, name, replacement))
        yield


# A replaced code object runs with the globals of its new function, so it finds the function to
# call among its constants: this string in the code of ``_answer`` is replaced by that function.
_ANSWERS = "tvmbridge: the function that answers"


def _answer() -> Any:
    answers: Any = "tvmbridge: the function that answers"
    return answers()


def _calling(installed: _Installed) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        return installed.call(*args, **kwargs)

    return stub


def _stack_here(owner: Any, name: str) -> list[Callable[..., Any]]:
    """Return this thread's replacements of ``owner.name``; the last one is in force."""
    installed = _INSTALLED.get((id(owner), name))
    stack: list[Callable[..., Any]] = installed.local.__dict__.get("stack", []) if installed else []
    return stack


def _install(owner: Any, name: str, user: Callable[..., Any]) -> _Installed:
    with _LOCK:
        installed = _INSTALLED.get((id(owner), name))
        if installed is not None:
            installed.users.add(user)
            return installed
        # ``vars`` has the owner's own entry; None if the attribute is inherited.
        installed = _Installed(_genuine(owner, name), vars(owner).get(name), {user})
        stub = _stub(owner, name, installed)
        _INSTALLED[id(owner), name] = installed
        setattr(owner, name, stub)
        return installed


def _genuine(owner: Any, name: str) -> Any:
    method = vars(owner).get(name)
    if isinstance(method, ClassMethodDescriptorType):  # Subclasses inherit the patch.
        return lambda kind, *args, **kwargs: method.__get__(None, kind)(*args, **kwargs)
    return getattr(owner, name)


def _stub(owner: Any, name: str, installed: _Installed) -> Any:
    stub = _calling(installed)
    stub.__dict__["installed"] = installed
    if not isinstance(owner, type):
        return stub
    if isinstance(vars(owner).get(name), ClassMethodDescriptorType):
        return classmethod(stub)
    own = installed.own if installed.own is not None else inspect.getattr_static(owner, name, None)
    return staticmethod(stub) if isinstance(own, staticmethod | classmethod) else stub


def unpatched(value: Any, default: Any) -> Any:
    """Return the owner's own attribute behind ``value``, which may be a patch; else ``default``."""
    installed = getattr(value, "installed", None) if type(value) is FunctionType else None
    if not isinstance(installed, _Installed):
        return value
    return default if installed.own is None else installed.own


def _release(owner: Any, name: str, user: Callable[..., Any]) -> None:
    """End the patch of ``user``; a second call finishes what an exception has interrupted."""
    with _LOCK:
        installed = _INSTALLED.get((id(owner), name))
        if installed is None or user not in installed.users:
            return
        stack = _stack_here(owner, name)
        if user in stack:
            stack.remove(user)
        if len(installed.users) == 1:
            if installed.own is not None:
                setattr(owner, name, installed.own)
            elif name in vars(owner):
                delattr(owner, name)
            del _INSTALLED[id(owner), name]
        installed.users.discard(user)

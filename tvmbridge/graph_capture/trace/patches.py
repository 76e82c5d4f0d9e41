"""Thread-local patches of PyTorch's functions.

What is patched while a module is traced is shared by all threads, some of which may be running
models meanwhile.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar
from unittest import mock

from torch import nn

_LOCK = threading.Lock()


@dataclass
class _Installed:
    """A patched attribute: how many use it, and the replacements of each thread."""

    genuine: Any
    own: Any
    users: int = 0
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
    """Within it calls of ``owner.name`` from this thread are calls of ``replacement``.

    Yields the genuine function.

    Args:
        owner: a module or a class.
        name: the name of a function or method of it.
        replacement: called with the genuine function first, then with the arguments.
        over: it is called with the replacement that this thread had before, if it had one.
    """
    installed = _install(owner, name)
    stack = installed.local.__dict__.setdefault("stack", [])
    if over and stack:
        replacement = partial(_called_over, stack[-1], replacement)
    stack.append(replacement)
    try:
        yield installed.genuine
    finally:
        stack.pop()
        _release(owner, name, installed)


def _called_over(
    before: Callable[..., Any],
    replacement: Callable[..., Any],
    genuine: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    return replacement(partial(before, genuine), *args, **kwargs)


def code_of_stubs() -> tuple[CodeType, ...]:
    """The code that runs in all threads in place of a patched function, before it is called."""
    stub = _calling(_Installed(None, None))
    return stub.__code__, _Installed.call.__code__


# The own code of functions that answer to one thread alone.
_OWN_CODE: dict[FunctionType, CodeType] = {}


def code_of(function: FunctionType) -> CodeType:
    """Return the code of a function, also where :func:`answers_here` has put other code there."""
    return _OWN_CODE.get(function, function.__code__)


@contextmanager
def answers_here(*flags: Any) -> Iterator[None]:
    """Within it calls of ``flags``, functions without arguments, are false in other threads.

    They stay the functions that they are, under all the names that they have been imported by.
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
    """Within it the forward of ``kind`` is ``replacement``, for this thread.

    Args:
        module: a forward of that kind which its submodules hold themselves is replaced too.
        kind: a class of modules.
        replacement: as for :func:`patched_here`.
    """
    with ExitStack() as stack:
        genuine = stack.enter_context(patched_here(kind, "forward", replacement))
        for owner in module.modules():
            own = owner.__dict__.get("forward")
            if isinstance(own, MethodType) and own.__func__ is genuine:
                bound = MethodType(partial(replacement, genuine), owner)
                stack.enter_context(mock.patch.dict(owner.__dict__, forward=bound))
        yield


# What is patched wherever forward is traced.
_TABLE: list[tuple[Any, str, Callable[..., Any]]] = []
_Replacement = TypeVar("_Replacement", bound=Callable[..., Any])


def patches(owner: Any, name: str) -> Callable[[_Replacement], _Replacement]:
    """Enter the decorated replacement into the table; otherwise as :func:`patched_here`."""

    def enter(replacement: _Replacement) -> _Replacement:
        _TABLE.append((owner, name, replacement))
        return replacement

    return enter


@contextmanager
def table_patched_here(module: nn.Module) -> Iterator[None]:
    """Within it all of the table is patched, for this thread.

    Args:
        module: what is traced; see :func:`forward_patched_here`.
    """
    with ExitStack() as stack:
        for owner, name, replacement in _TABLE:
            if name == "forward":
                stack.enter_context(forward_patched_here(module, owner, replacement))
            else:
                stack.enter_context(patched_here(owner, name, replacement))
        yield


# Code has constants of its own, and the globals of the function that it is given to.
_ANSWERS = "tvmbridge: the function that answers"


def _answer() -> Any:
    answers: Any = "tvmbridge: the function that answers"
    return answers()


def _calling(installed: _Installed) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        return installed.call(*args, **kwargs)

    return stub


def _install(owner: Any, name: str) -> _Installed:
    with _LOCK:
        installed = _INSTALLED.get((id(owner), name))
        if installed is None:
            # What the owner itself holds; None: it inherits the attribute.
            installed = _Installed(getattr(owner, name), vars(owner).get(name))
            _INSTALLED[id(owner), name] = installed
            setattr(owner, name, _stub(owner, name, installed))
        installed.users += 1
        return installed


def _stub(owner: Any, name: str, installed: _Installed) -> Any:
    stub = _calling(installed)
    stub.__dict__["installed"] = installed
    unbound = isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)
    return staticmethod(stub) if unbound and isinstance(owner, type) else stub


def unpatched(value: Any, default: Any) -> Any:
    """What the owner of ``value`` holds itself: ``default`` where a patch alone stands there."""
    installed = getattr(value, "installed", None) if type(value) is FunctionType else None
    if not isinstance(installed, _Installed):
        return value
    return default if installed.own is None else installed.own


def _release(owner: Any, name: str, installed: _Installed) -> None:
    with _LOCK:
        installed.users -= 1
        if installed.users:
            return
        del _INSTALLED[id(owner), name]
        if installed.own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, installed.own)

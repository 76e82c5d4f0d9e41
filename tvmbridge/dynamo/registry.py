"""Make PyTorch's registry of backends safe for threads that look up a backend at the same time.

Each thread that finds a backend's name without a function loads the entry point and registers the
function. PyTorch raises an error in every thread but the first, as the name is already registered.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from tvmbridge.core.torch_private import backend_registry, registered_backends

_NAME = "_register_backend_once"


def register_backends_once() -> None:
    """Patch PyTorch's registry to accept a function that it already has by the same name.

    The code of ``register_backend`` is replaced, not the function object, because threads that wait
    for an import already hold the function object.
    """
    registry = backend_registry()
    register, space = registry.register_backend, vars(registry)
    if _NAME in space:
        return
    genuine = FunctionType(register.__code__, space, register.__name__, register.__defaults__)

    def once(compiler_fn: Callable[..., Any] | None, name: str | None, tags: Any) -> Any:
        if compiler_fn is not None and registered_backends().get(name) is compiler_fn:
            return compiler_fn
        return genuine(compiler_fn, name, tags)

    space[_NAME] = once
    register.__code__ = _register.__code__


def _register(compiler_fn: Any = None, name: Any = None, tags: Any = ()) -> Any:
    """Provide the new code of PyTorch's ``register_backend``; its globals are PyTorch's module."""
    return _register_backend_once(compiler_fn, name, tags)  # type: ignore[name-defined] # noqa: F821

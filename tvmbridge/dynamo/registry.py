"""PyTorch's registry of backends, in which several threads may look one up at the same time.

Each thread that finds a name without a function loads the entry point, and registers what it gets.
PyTorch raises in all of them but the first.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from tvmbridge.core.torch_private import backend_registry, registered_backends

_NAME = "_register_backend_once"


def register_backends_once() -> None:
    """Let the registry accept a function again that it has by the same name.

    The function that registers keeps its identity: threads that wait for an import hold it already.
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
    """The code of PyTorch's function from then on, which runs among the names of its module."""
    return _register_backend_once(compiler_fn, name, tags)  # type: ignore[name-defined] # noqa: F821

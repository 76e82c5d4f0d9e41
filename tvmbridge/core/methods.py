"""A method of a module as the forward of another module, which compiles like any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class _ModuleMethod:
    """A descriptor for the forward of :class:`MethodOf`: returns the method of the submodule."""

    def __init__(self, kind: type[nn.Module], name: str) -> None:
        self.kind = kind
        self.name = name

    def __get__(self, holder: Any, kind: type) -> Callable[..., Any]:
        method = getattr(self.kind, self.name, None)
        if holder is None or (own := holder.__dict__["own"]) is None:
            assert method is not None
            return method if holder is None else method.__get__(holder.module)
        return own


class MethodOf(nn.Module):
    """A module whose forward is a method of its only submodule.

    - ``module``: the submodule, whose method is called.
    - ``method``: the name of the method.
    - ``own``: the method that is set on the instance; None if the method is the class's.

    Example: ``method_of(vae, "encode", None)(x)`` is ``vae.encode(x)``.
    """

    module: nn.Module
    method: str

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module = module
        self.own = own

    @property
    def training(self) -> bool:
        """The training flag of the submodule."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the value: only the submodule has a training flag."""


def method_of(module: nn.Module, name: str, own: Callable[..., Any] | None) -> MethodOf:
    """Return a module whose forward is the method ``name`` of ``module``.

    Args:
        own: the method that is set on the instance; None to use the class's method.
    """
    kind = type(module)
    forward = _ModuleMethod(kind, name)
    body = {"forward": forward, "method": name, "__module__": __name__}
    made: type[MethodOf] = type(f"{kind.__name__}.{name}", (MethodOf,), body)
    return made(module, own)

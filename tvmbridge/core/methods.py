"""Methods: a method of a module as the forward of another module, which compiles like any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class _ModuleMethod:
    """The forward of a :class:`MethodOf`: the method that its module has."""

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
    """A module whose forward is a method of its one submodule.

    module: whose method it is.
    own: the method where the instance has one of its own, which its class has not.

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
        """The mode of its module."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Keep the mode of the module."""


def method_of(module: nn.Module, name: str, own: Callable[..., Any] | None) -> MethodOf:
    """The method ``name`` of ``module`` as a module; ``own``: as the instance itself has it."""
    kind = type(module)
    forward = _ModuleMethod(kind, name)
    body = {"forward": forward, "method": name, "__module__": __name__}
    made: type[MethodOf] = type(f"{kind.__name__}.{name}", (MethodOf,), body)
    return made(module, own)

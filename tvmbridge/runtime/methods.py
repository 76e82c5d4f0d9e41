"""Methods of a module that are dispatched, in addition to its forward or instead of it."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tvmbridge.calls.standins import NO_ATTRIBUTE, STAND_IN, StandsForForward
from tvmbridge.core.contents import MISSING
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.methods import MethodOf, method_of
from tvmbridge.runtime.guards.forwards import forward_of_class, rebound


class DispatchedMethod(StandsForForward):
    """Replaces a method in a module's ``__dict__`` and calls the method's dispatcher.

    - ``holder``: a module whose forward is the method; this module is dispatched.
    - ``own``: the method that was set on the instance; None if it is the class's method.
    """

    def __init__(self, holder: MethodOf) -> None:
        self.holder = holder
        self.own = holder.own
        # The reference count at the last check that found this object in no copy of the module.
        self._references = 0
        functools.update_wrapper(self, forward_of_class(holder), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = sys.getrefcount(self)
        if count != self._references:
            self._references = 0 if self._is_in_copies() else count
        return self.holder.forward(*args, **kwargs)

    def _is_in_copies(self) -> bool:
        """Whether a shallow copy of the module holds this same object.

        A call does not show whether it came through the original or the copy.

        Raises:
            BridgeError: the copy's attributes differ from the original's.
        """
        found = False
        module, name = self.holder.module, self.holder.method
        for held in gc.get_referrers(self):
            if not isinstance(held, dict) or held is module.__dict__ or held.get(name) is not self:
                continue
            owners = [m for m in gc.get_referrers(held) if isinstance(m, nn.Module)]
            found |= bool(owners)
            if owners and not _same_entries(held, module.__dict__):
                raise BridgeError(
                    f"{name} of a {type(module).__name__} was called, of which there is a shallow "
                    "copy (copy.copy, a replica of DataParallel) that has the same dispatch: call "
                    "remove_tvm_dispatch before it is copied, or deepcopy the module"
                )
        return found

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module = memo.get(id(self.holder.module))
        if module is None:
            return self
        own = None if self.own is None else rebound(self.own, self.holder.module, module, memo)
        if STAND_IN in memo:
            return own or NO_ATTRIBUTE
        holder = type(self.holder)(module, own)
        # The copied guards look up the holder's dictionaries in the memo.
        memo[id(self.holder)] = holder
        for name, held in self.holder.__dict__.items():
            if isinstance(held, dict):
                memo[id(held)] = holder.__dict__[name]
        holder.__dict__["forward"] = copy.deepcopy(self.holder.__dict__["forward"], memo)
        return DispatchedMethod(holder)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.holder.module, self.holder.method)


def _same_entries(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[n] is v for n, v in other.items())


def methods_of(module: nn.Module) -> dict[str, DispatchedMethod]:
    """Return the dispatched methods of ``module`` by name."""
    held = module.__dict__.items()
    return {name: value for name, value in held if isinstance(value, DispatchedMethod)}


def samples_by_method(methods: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the sample of each method by name; MISSING if a method has no sample.

    Raises:
        TypeError: ``methods`` is a string.
    """
    if isinstance(methods, str):
        raise TypeError(f"methods is a string, {methods!r}: give a list of names")
    if isinstance(methods, Mapping):
        return {name: MISSING if s is None else s for name, s in methods.items()}
    return dict.fromkeys(methods, MISSING)


def holder_of(module: nn.Module, name: str) -> MethodOf:
    """Return a module whose forward is the method ``name`` of ``module``, to be dispatched.

    Raises:
        ValueError: the module has no such method.
    """
    installed = module.__dict__.get(name)
    if isinstance(installed, DispatchedMethod):
        return installed.holder
    function = getattr(type(module), name, None) if installed is None else installed
    if not callable(function) or isinstance(function, type | nn.Module) or name.startswith("__"):
        raise ValueError(f"{type(module).__name__} has no method {name!r}")
    if installed is None and isinstance(_static(type(module), name), staticmethod | classmethod):
        raise ValueError(f"{name} of {type(module).__name__} is no method of its instances")
    return method_of(module, name, installed)


def _static(kind: type, name: str) -> Any:
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)


def install(holder: MethodOf) -> None:
    """Replace the method in its module's ``__dict__``, so that calls go through the dispatcher."""
    installed = holder.module.__dict__.get(holder.method)
    if not isinstance(installed, DispatchedMethod):
        holder.module.__dict__[holder.method] = DispatchedMethod(holder)


def uninstall(module: nn.Module, name: str) -> None:
    """Restore the method ``name`` that ``module`` had before its dispatch."""
    method = module.__dict__.pop(name)
    if method.own is not None:
        module.__dict__[name] = method.own

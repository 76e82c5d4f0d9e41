"""The dispatcher: the forward of a dispatched module, which chooses an executor or the original."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from tvmbridge.calls.standins import NO_ATTRIBUTE, STAND_IN, StandsForForward
from tvmbridge.calls.surroundings import refused_now
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.runtime.executor import Executor, Served
from tvmbridge.runtime.guards.forwards import (
    calling_module,
    forward_of_class,
    pickled_forward,
    rebound,
    references_of_a_call,
)
from tvmbridge.runtime.guards.signature import has_plain_names, with_plain_names
from tvmbridge.runtime.guards.watch import native_half
from tvmbridge.runtime.specialization import USES
from tvmbridge.runtime.timed_path import AsidePath

Code = TypeVar("Code", bound=Executor)

# References to a dispatcher during a call, if no copy of the module holds the dispatcher too.
_ALONE = references_of_a_call()


class Dispatcher(StandsForForward):
    """The forward of a dispatched module.

    It is installed as ``forward`` in the module's ``__dict__``; dispatch changes nothing else in
    the module. A deep copy of the module has its own dispatcher, with the same code and counters
    at zero. An unpickled module has no dispatcher, since compiled code is not pickled.
    """

    def __init__(self, code: Executor) -> None:
        functools.update_wrapper(self, code.original)
        # Afterwards, because the original may be a dispatcher with attributes of these names.
        self.code = code
        self.module = code.module
        self.own = code.own
        self._paths = code.paths
        self._outside_of_graphs = _outside_of_graphs(code.removal)

    def __getattr__(self, name: str) -> Any:
        if name == "__func__" and sys._getframe(1).f_globals["__name__"].startswith("torch.jit"):
            raise BridgeError(
                f"torch.jit.script cannot read the forward of a dispatched "
                f"{type(self.module).__name__}: call {self.code.removal} on it first, or script it "
                "before it is dispatched"
            )
        # Code that inspects functions (__code__, __defaults__, __globals__) sees the module's own
        # forward. Without __func__, accelerate's prepare wraps the dispatcher itself.
        if name.startswith("__") and name not in ("__func__", "__self__") and "code" in vars(self):
            return getattr(self.code.original, name)
        raise AttributeError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._outside_of_graphs(self, args, kwargs)
        known = self._paths.known
        for fast, specialization in known:
            leaves = fast.guard.check(args, kwargs)
            if leaves is not None:
                if sys.getrefcount(self) > _ALONE and self._is_of_copy(sys._getframe(1)):
                    break
                specialization.last_use = next(USES)
                if fast is not known[0][0]:
                    self._paths.put_first(fast, specialization)
                return fast.entry.run_fast(fast, leaves, (args, kwargs))
        frame = sys._getframe(1)
        if self._is_of_copy(frame):  # whose attributes may differ from this module's
            own = self.own or forward_of_class(calling_module(frame) or self.module)
            return self._fall_back(own, Reason(Kind.COPY), args, kwargs)
        reason = refused_now()
        if reason is None and not has_plain_names(kwargs):
            named = with_plain_names(kwargs, self.code.original)
            reason = Reason(Kind.KEYWORD) if named is None else None
            kwargs = named or kwargs
        if reason is not None:
            return self._fall_back(None, reason, args, kwargs)
        with self.code.packing:
            served = self.code.serve(args, kwargs)
            if isinstance(served, Served):
                self._shorten(args, kwargs)
                return served.results
            return self._fall_back(None, served, args, kwargs)

    def _shorten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let native code serve calls like this one, if the module's own forward serves them."""
        path = self._paths.known[0][0] if self._paths.known else None
        if isinstance(path, AsidePath) and self.module.__dict__.get("forward") is self:
            path.make_native(self.own, (args, kwargs))
            self._paths.find_asides()
        self._become_native()

    def _become_native(self) -> None:
        """Replace this dispatcher by a native one as soon as there are calls to pass on."""
        held = self.module.__dict__
        if self._paths.asides and type(self) is Dispatcher and held.get("forward") is self:
            held["forward"] = _native(self)

    def _is_of_copy(self, frame: Any) -> bool:
        return calling_module(frame) not in (None, self.module)

    def _fall_back(
        self,
        of_copy: Callable[..., Any] | None,
        reason: Reason,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run ``of_copy``, the own forward of a shallow copy; None: that of the module."""
        code = self.code
        code.tally.note(reason)
        args, kwargs = code.own_arguments(args, kwargs)
        if of_copy is not None:
            return of_copy(*args, **kwargs)
        results = code.run_own((args, kwargs))
        code.fell_back(reason, (args, kwargs))
        self._become_native()
        return results

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self
        own = None if self.own is None else rebound(self.own, self.module, module, memo)
        if STAND_IN in memo:
            return own or NO_ATTRIBUTE
        return Dispatcher(self.code.renewed(module, own, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled_forward(self.module, self.own)


def _native(dispatcher: Dispatcher) -> Dispatcher:
    """Return the same dispatcher, whose calls go through native code first."""
    kind, references = _native_class()
    made = kind.__new__(kind)
    made.__dict__.update(vars(dispatcher))
    made.connect(dispatcher._paths.asides, Dispatcher.__call__, references)
    return cast(Dispatcher, made)


@functools.cache
def _native_class() -> tuple[Any, int]:
    """Return the class of native dispatchers, and the references to one of them during a call."""
    native = native_half()
    counting = type("Counting", (native.Forward,), {"own": None})
    kind = type("NativeDispatcher", (native.Forward, Dispatcher), {"__doc__": Dispatcher.__doc__})
    for each in (counting, kind):
        native.take_calls(each)
    return kind, references_of_a_call(counting)


def code_of(forward: Any, kind: type[Code]) -> Code | None:
    """Return the executor of ``forward``; None if it is no dispatcher of this kind of executor."""
    code = forward.code if isinstance(forward, Dispatcher) else None
    return code if isinstance(code, kind) else None


@functools.cache
def _outside_of_graphs(removal: str) -> Callable[..., Any]:
    """Return a function that calls a dispatcher, at which torch.compile breaks its graph."""

    def call(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return dispatcher(*args, **kwargs)

    reason = (
        "this module is dispatched to TVM (tvmbridge): torch.compile leaves it out of its graphs, "
        f"and fullgraph=True needs {removal}(module)"
    )
    disabled: Callable[..., Any] = torch.compiler.disable(call, reason=reason)
    return disabled

"""The dispatcher: the forward of a dispatched module, which chooses TVM or the original."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tvmbridge.compiled import compile_module
from tvmbridge.errors import BridgeError, BuildError
from tvmbridge.options import CompileOptions
from tvmbridge.packing import Packing
from tvmbridge.refusal import raise_if_forward_refuses
from tvmbridge.specialization import Mode, Specialization, Variant
from tvmbridge.state import ModuleState

logger = logging.getLogger(__name__)


class Dispatcher:
    """The forward of a dispatched module.

    It lives in the module's ``__dict__`` under ``forward``, which is all that a dispatched module
    differs by. A deep copy of the module has a dispatch of its own, with the same code and
    counters at zero; an unpickled module has none, since compiled code is not pickled.
    """

    def __init__(
        self, module: nn.Module, original: Callable[..., Any], target: Any, options: CompileOptions
    ) -> None:
        self.module = module
        self.original = original
        self.target = target
        self.options = options
        self.specializations: list[Specialization] = []
        self.fallbacks: Counter[str] = Counter()
        self.packing = Packing(module)
        self._compiling = threading.RLock()
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = _context_refuses()
        if reason is not None:
            return self._fall_back(reason, args, kwargs)
        with self.packing:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = None
        for specialization in self.specializations:
            leaves = specialization.signature.flatten(args, kwargs)
            if leaves is None:
                reason = "the structure of the arguments differs"
                continue
            reason = specialization.signature.mismatch(leaves)
            if reason is not None:
                continue
            variant = self._variant(specialization, leaves, args, kwargs)
            if isinstance(variant, str):
                reason = variant
                break
            tensors = variant.state.tensors()
            reason = variant.mismatch(leaves, tensors)
            if reason is None:
                return variant.run(leaves, tensors, (args, kwargs))
        return self._fall_back(reason or "nothing is compiled", args, kwargs)

    def _variant(
        self,
        specialization: Specialization,
        leaves: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Variant | str:
        """The code for the mode of this call, compiled now if it is the first; or why not."""
        device = specialization.signature.device_type
        if torch.is_autocast_enabled(device):
            return "autocast is on"
        needs_grad = torch.is_grad_enabled() and self.anything_requires_grad(specialization, leaves)
        mode = Mode(self.module.training, needs_grad)
        variant = specialization.variants.get(mode)
        if variant is not None:
            return variant
        with self._compiling:
            if mode not in specialization.variants and mode not in specialization.failures:
                try:
                    self.compile(specialization, mode, args, kwargs)
                except BridgeError as error:
                    specialization.failures[mode] = f"{mode}: {error}"
                    logger.warning("%s stays with its own forward: %s", self._name(), error)
        return specialization.variants.get(mode) or specialization.failures[mode]

    def anything_requires_grad(self, specialization: Specialization, leaves: list[Any]) -> bool:
        """Whether an argument or a parameter requires a gradient."""
        if any(leaves[i].requires_grad for i, *_ in specialization.signature.tensors):
            return True
        return any(p.requires_grad for p in self.module.parameters())

    def compile(
        self,
        specialization: Specialization,
        mode: Mode,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Compile ``specialization`` for ``mode``, in which the module must stand, and try it."""
        with with_own_forward(self.module, self.original):
            compiled = compile_module(
                self.module,
                args,
                kwargs,
                needs_grad=mode.needs_grad,
                target=self.target,
                options=self.options,
                packing=self.packing,
            )
            captured = compiled.captured
            state = ModuleState(self.module, captured.inputs, captured.aliases)
            variant = Variant(state, compiled, self.packing)
            try:
                variant.try_out(specialization.signature.flatten(args, kwargs) or [])
            except Exception as error:
                raise_if_forward_refuses(self.module, args, kwargs)
                raise BuildError(f"the compiled code cannot run on the sample: {error}") from error
        for names in compiled.packs:
            self.packing.claim(names)
        specialization.variants[mode] = variant

    def _fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.fallbacks[reason]:
            logger.info("%s runs its own forward: %s", self._name(), reason)
        self.fallbacks[reason] += 1
        return self.original(*args, **kwargs)

    def _name(self) -> str:
        return type(self.module).__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self
        original = _rebind(self.original, self.module, module, memo)
        duplicate = Dispatcher(module, original, self.target, self.options)
        duplicate.specializations = [
            s.rebound(memo, duplicate.packing) for s in self.specializations
        ]
        duplicate.packing.claim_like(self.packing)
        return duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        return _original_forward, (self.module, own_instance_forward(self))


def _rebind(
    original: Callable[..., Any], module: nn.Module, other: nn.Module, memo: dict[int, Any]
) -> Callable[..., Any]:
    if isinstance(original, types.MethodType) and original.__self__ is module:
        return types.MethodType(original.__func__, other)
    return copy.deepcopy(original, memo)


def own_instance_forward(dispatcher: Dispatcher) -> Callable[..., Any] | None:
    """The forward that stood in the instance's own ``__dict__`` before dispatch, if any."""
    original = dispatcher.original
    module = dispatcher.module
    plain = isinstance(original, types.MethodType) and original.__self__ is module
    if plain and original.__func__ is type(module).forward:  # type: ignore[attr-defined]
        return None
    return original


def _original_forward(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    return own or types.MethodType(type(module).forward, module)


class with_own_forward:
    """Within it the module has its own forward, so that capture traces that."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self.module = module
        self.original = original

    def __enter__(self) -> None:
        self.installed = self.module.__dict__.get("forward")
        if self.installed is not None:
            self.module.__dict__["forward"] = self.original

    def __exit__(self, *_: object) -> None:
        if self.installed is not None:
            self.module.__dict__["forward"] = self.installed


def _context_refuses() -> str | None:
    """Why compiled code must not run in the present context; None when it may."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state():
        return "the module is being traced"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode is active"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function transform is active"
    return None

"""Leaks: fake tensors that outlive the trace they belong to, in caches outside of the module.

A function with a cache, or a dict in a global, that is filled while a module is traced would hand a
fake tensor to every later call, eager ones too. Weak references tell whether any is left. Caches,
containers and names that forward's code leads to get back what they had; others are refused.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from tvmbridge.core.contents import CONTAINERS, DEPTH, all_held, attributes_of
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    MetaTensorDescriber,
    TorchDispatchMode,
    pytree,
)
from tvmbridge.graph_capture.trace.patches import patched_here


class Made(TorchDispatchMode):
    """Notes the tensors that are made within it, and keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._references.append(weakref.ref(result))
        return results

    def alive(self) -> list[torch.Tensor]:
        """Those that are still there; nobody else may use them any more."""
        if self._alive():
            # Nearly always circles of what the trace made: a look at all objects takes seconds.
            gc.collect(1)
        if self._alive():
            gc.collect()
        return self._alive()

    def _alive(self) -> list[torch.Tensor]:
        found = (reference() for reference in self._references)
        return [tensor for tensor in found if tensor is not None]


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Within it what is made stays among the youngest objects, where circles are found quickly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def tensors_forgotten() -> Iterator[None]:
    """After it what PyTorch has noted of tensors to make fake ones of them is forgotten.

    Graphs keep their fake tensors, these the mode, and the mode weak references to parameters: who
    exchanges these in place (``torch.utils.swap_tensors``) may not find any.
    """
    made: list[MetaTensorDescriber] = []

    def make(
        genuine: Callable[..., None], describer: MetaTensorDescriber, *args: Any, **kwargs: Any
    ) -> None:
        made.append(describer)
        genuine(describer, *args, **kwargs)

    try:
        with patched_here(MetaTensorDescriber, "__init__", make):
            yield
    finally:
        for describer in made:
            describer.lookup_tensor.clear()
            describer.lookup_storage.clear()


def release_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Let the frames that ``error`` went through keep none of their variables alive.

    Args:
        error: what was raised; those that it followed are looked at too.
        handled: what was being handled before, whose frames are left alone.
    """
    seen = {id(handled)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        waiting += [each.__cause__, each.__context__]


@contextmanager
def saved_without_circles() -> Iterator[None]:
    """Within it autograd keeps no tensor for good.

    Hooks that keep the very tensor do, where it is the result of the node that it is saved for.
    """
    with saved_tensors_hooks(_detached, lambda saved: saved):
        yield


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunction():
        return tensor.detach()


def refuse_hidden(
    kept: Iterable[torch.Tensor], module: nn.Module, read: Iterable[Any] = ()
) -> None:
    """Raise CaptureError if one that is ``kept`` is neither the ``module``'s nor in what is read.

    A stand-in's own attributes go with it.
    """
    own = (value for m in module.modules() for value in vars(m).values())
    known = {id(held) for value in (*own, *read) for held in all_held(value)}
    if any(id(tensor) not in known for tensor in kept):
        raise CaptureError(
            f"forward of {type(module).__name__} keeps a tensor outside of the module, where no "
            "name in its code leads to; keep it in an attribute or a global"
        )


def holds_fakes(value: Any) -> bool:
    """Whether ``value`` is a fake tensor or a proxy, or holds one."""
    return any(issubclass(type(held), FakeTensor | fx.Proxy) for held in all_held(value))


def remove_fakes(now: Any, before: Any, depth: int = DEPTH) -> None:
    """Take fake tensors and proxies out of a container.

    What they replaced comes from ``before``, its copy.
    """
    entries, earlier = _entries(now), _entries(before)
    if not isinstance(now, CONTAINERS) and hasattr(now, "__dict__"):
        now = vars(now)
    for key in reversed(entries):
        if not holds_fakes(entries[key]):
            continue
        if key not in earlier or holds_fakes(earlier[key]):
            del now[key]
        elif depth and type(entries[key]) is type(earlier[key]) and _entries(entries[key]):
            remove_fakes(entries[key], earlier[key], depth - 1)
        else:
            now[key] = earlier[key]


def _entries(value: Any) -> dict[Any, Any]:
    """What a container or a plain object holds that may be exchanged, by its key."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | deque):
        return dict(enumerate(value))
    return attributes_of(value) if not isinstance(value, (*CONTAINERS, torch.Tensor)) else {}

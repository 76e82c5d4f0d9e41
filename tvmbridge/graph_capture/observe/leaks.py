"""Leaks: fake tensors that outlive the trace they belong to, in caches outside of the module.

A function with a cache, or a dict in a global, that is filled while a module is traced would hand a
fake tensor to every later call, eager ones too.
"""

from __future__ import annotations

import functools
import gc
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tvmbridge.graph_capture.trace.patches import patched_here

# How many containers may lie around a tensor.
_DEPTH = 4
_CACHE: Any = functools._lru_cache_wrapper
_FIXED = (tuple, frozenset)


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

    def forget(self) -> bool:
        """Remove what is left of the tensors from caches and containers; whether there was any.

        Nobody else may use them any more.
        """
        if not self._alive():
            return False
        # Nearly always circles of what the trace made: a look at all objects takes seconds.
        gc.collect(1)
        if not self._alive():
            return False
        gc.collect()
        kept = self._alive()
        for tensor in kept:
            _forget(tensor, [kept], _DEPTH)
        return bool(kept)

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
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def _forget(value: Any, ours: list[Any], depth: int) -> None:
    if depth == 0:
        return
    holders = gc.get_referrers(value)
    skipped = [*ours, holders]
    for holder in holders:
        if isinstance(holder, types.FrameType) or any(holder is s for s in skipped):
            continue
        if isinstance(holder, _CACHE):
            holder.cache_clear()
        elif isinstance(holder, dict):
            _forget_entries(holder, value, skipped)
            if not holder and not _is_namespace(holder):
                _forget_within(holder, skipped, depth - 1)
        elif isinstance(holder, list | deque):
            for index in reversed([i for i, held in enumerate(holder) if held is value]):
                del holder[index]
            if not holder:
                _forget_within(holder, skipped, depth - 1)
        elif isinstance(holder, set):
            holder.discard(value)
        elif isinstance(holder, _FIXED) or type(holder).__module__ == "functools":
            # A link of a bounded cache is a "functools._lru_list_elem".
            _forget(holder, skipped, depth - 1)


def _forget_within(emptied: Any, ours: list[Any], depth: int) -> None:
    """Remove a container of removed tensors from those that it was put into."""
    holders = gc.get_referrers(emptied)
    for holder in holders if depth else ():
        if isinstance(holder, dict) and not _is_namespace(holder):
            _forget_entries(holder, emptied, [*ours, holders])


def _is_namespace(entries: dict[Any, Any]) -> bool:
    """Whether the dict holds the names of a module, a class, an instance or a function's frame."""
    if "__builtins__" in entries or "__module__" in entries:
        return True
    return any(getattr(h, "__dict__", None) is entries for h in gc.get_referrers(entries))


def _forget_entries(entries: dict[Any, Any], value: Any, ours: list[Any]) -> None:
    holders = [h for h in gc.get_referrers(entries) if not any(h is o for o in ours)]
    caches = [h for h in holders if isinstance(h, _CACHE)]
    for cache in caches:
        cache.cache_clear()
    if caches:
        return
    classes = [h for h in holders if isinstance(h, type)]
    for key in [k for k, held in entries.items() if held is value]:
        if classes:
            setattr(classes[0], key, None)
        elif _is_namespace(entries):
            # What it named before is not known; who fills it at the first call asks for None.
            entries[key] = None
        else:
            del entries[key]

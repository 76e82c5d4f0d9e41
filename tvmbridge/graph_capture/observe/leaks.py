"""Leaks: find and remove fake tensors that outlive their trace in caches outside of the module.

If a trace fills a cache or a global dict, every later call would get a fake tensor from it, in
eager PyTorch too. Weak references show whether a fake tensor is still alive. Caches, containers and
names that forward's code refers to are restored. If another object keeps a fake tensor, the module
is refused.
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

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.contents import CONTAINERS, DEPTH, all_held, attributes_of
from tvmbridge.core.errors import StateWrittenError
from tvmbridge.core.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    MetaTensorDescriber,
    TorchDispatchMode,
    pytree,
)


class Made(TorchDispatchMode):
    """Record the results of all operators by weak references, which keep no tensor alive."""

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
        """Return the recorded tensors that are still alive after garbage collection."""
        if self._alive():
            # Nearly always, reference cycles of young objects keep the tensors alive. A full
            # collection takes seconds.
            gc.collect(1)
        if self._alive():
            gc.collect()
        return self._alive()

    def _alive(self) -> list[torch.Tensor]:
        found = (reference() for reference in self._references)
        return [tensor for tensor in found if tensor is not None]


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Disable automatic garbage collection inside this context.

    New objects then stay in the youngest generation, where a collection finds cycles quickly.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def tensors_forgotten() -> Iterator[None]:
    """On exit, clear the tensor maps of the fake-tensor describers created inside this context.

    A graph keeps its fake tensors, which keep the fake mode, whose describer has weak references to
    parameters. ``torch.utils.swap_tensors`` fails for a parameter with weak references.
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
    """Clear the local variables of the frames in the traceback of ``error``.

    Args:
        handled: an exception that was already being handled, whose frames are left alone.
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
    """Make autograd save detached tensors inside this context, which avoids reference cycles.

    A hook that keeps the saved tensor itself creates a cycle if the tensor is the output of the
    node that saves it.
    """
    with saved_tensors_hooks(_detached, lambda saved: saved):
        yield


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunction():
        return tensor.detach()


def refuse_hidden(
    kept: Iterable[torch.Tensor], module: nn.Module, read: Iterable[Any] = ()
) -> None:
    """Refuse a forward that keeps a tensor at a place that cannot be restored.

    Args:
        kept: the tensors of the observation that are still alive.
        read: the values that forward reads; tensors in them can be removed.

    Raises:
        StateWrittenError: a kept tensor is neither in ``module`` nor in ``read``.
    """
    own = (value for m in module.modules() for value in vars(m).values())
    known = set(map(id, all_held(*own, *read)))
    if any(id(tensor) not in known for tensor in kept):
        raise StateWrittenError(
            f"forward of {type(module).__name__} keeps a tensor outside of the module, where no "
            "name in its code leads to; keep it in an attribute or a global"
        )


def holds_fakes(value: Any) -> bool:
    """Whether ``value`` is a fake tensor or a proxy, or holds one."""
    return any(issubclass(type(held), FakeTensor | fx.Proxy) for held in all_held(value))


def remove_fakes(now: Any, before: Any, depth: float = DEPTH) -> None:
    """Remove fake tensors and proxies from a container or a plain object.

    Args:
        before: an earlier copy of it, whose entries replace the removed ones.
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
    """Return the replaceable entries of a container or plain object, by key, index or name."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | deque):
        return dict(enumerate(value))
    return attributes_of(value) if not isinstance(value, (*CONTAINERS, torch.Tensor)) else {}

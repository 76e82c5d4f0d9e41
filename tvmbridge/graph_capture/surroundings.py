"""The context in which a thread traces and compiles, without the caller's modes and hooks."""

from __future__ import annotations

import linecache
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize

from tvmbridge.calls.generators import torch_generator_kept
from tvmbridge.calls.own_calls import all_own_calls
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.autocast import without_autocast
from tvmbridge.core.torch_private import generated_sources, saved_tensors_hooks_in_force
from tvmbridge.graph_capture.observe.leaks import tensors_forgotten
from tvmbridge.graph_capture.observe.settings import outside_of_autocast_regions, settings_kept
from tvmbridge.graph_capture.observe.undo import undone_if_refused
from tvmbridge.graph_capture.profilers import profiler_errors_put_off
from tvmbridge.graph_capture.trace.dynamo import dynamo_left_out


@contextmanager
def tracing_here() -> Iterator[None]:
    """Let this thread, which holds the lock of ``compiling()``, trace within the context.

    It may be nested. In other threads ``torch.compiler.is_compiling()`` stays False, although all
    threads share its flag. If an exception leaves the context, the runs of forward inside it leave
    no changes.
    """
    with (
        profiler_errors_put_off(),
        _no_more_hooks_on_saved_tensors(),
        dynamo_left_out(),
        tensors_forgotten(),
        _failures_not_logged(),
        undone_if_refused(),
        _parametrizations_computed(),
    ):
        yield


class _Nothing(dict[Any, Any]):
    """A cache that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


# One for all traces: equal layers share code only if no name of PyTorch has another value.
_NOTHING = _Nothing()


@contextmanager
def _parametrizations_computed() -> Iterator[None]:
    """Compute each parametrization within the context, though the caller is in ``cached()``.

    The cache belongs to the process, and would keep the tensors of a trace for later calls.
    """
    kept, parametrize._cache = parametrize._cache, _NOTHING
    try:
        yield
    finally:
        if parametrize._cache is _NOTHING:  # Otherwise the last region of ``cached()`` has ended.
            parametrize._cache = kept if parametrize._cache_enabled or not kept else {}


@contextmanager
def _failures_not_logged() -> Iterator[None]:
    """Suppress PyTorch's log of operators that fail on fake tensors, in this thread.

    The error is also raised, and then reported without the traceback of the trace.
    """
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.exc_info is None

    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hide the caller's settings, modes and hooks from the compilation within the context.

    On exit, restore the caller's generator states: a module's own ``__deepcopy__`` may draw
    random numbers.
    """
    with (
        all_own_calls() as own,
        torch_generator_kept(own),
        settings_kept(own.may_set),
        outside_of_autocast_regions(),
        without_autocast(),
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),
        _without_hooks_on_saved_tensors(),
        _sources_forgotten(),
    ):
        yield


@contextmanager
def _no_more_hooks_on_saved_tensors() -> Iterator[None]:
    """On exit, remove hooks on saved tensors that a forward that raised has left."""
    before = saved_tensors_hooks_in_force(True)
    try:
        yield
    finally:
        while saved_tensors_hooks_in_force(True) not in (before, None):
            torch.autograd.graph.saved_tensors_hooks(_Saved, _if_not_written).__exit__()


class _Saved:
    """A tensor that autograd saved, and its version at that time.

    ``tensor`` is None once the compilation has ended.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version


@contextmanager
def _without_hooks_on_saved_tensors() -> Iterator[None]:
    """Do not call the caller's hooks on saved tensors within the context.

    A result that is saved by its own autograd node refers to that node. Python cannot collect this
    cycle, because it goes through a hook's value in C++, so the cycle is broken on exit.
    """
    known: list[weakref.ref[_Saved]] = []

    def save(tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        known.append(weakref.ref(saved))
        return saved

    try:
        with torch.autograd.graph.saved_tensors_hooks(save, _if_not_written):
            yield
    finally:
        for reference in known:
            saved = reference()
            if saved is not None:
                saved.tensor = None


def hooks_of_user() -> bool:
    """Whether hooks on saved tensors are in force that no compilation has set."""
    hooks = saved_tensors_hooks_in_force(True)
    return hooks is not None and hooks[1] is not _if_not_written


def _if_not_written(saved: _Saved) -> torch.Tensor:
    """Return a saved tensor after the version check that autograd makes if no hooks are set.

    Raises:
        RuntimeError: the tensor was modified in place, or the compilation has ended.
    """
    if saved.tensor is None:
        raise RuntimeError("the graph of a compilation that has ended cannot be differentiated")
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation"
        )
    return saved.tensor


@contextmanager
def _sources_forgotten() -> Iterator[None]:
    """On exit, delete the sources that PyTorch generated in this thread and would keep for good."""
    kept: list[str] = []

    def noted(genuine: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        kept.append(genuine(*args, **kwargs))
        return kept[-1]

    with patched_here(type(generated_sources), "cache", noted):
        try:
            yield
        finally:
            for name in kept:
                generated_sources.eval_cache.pop(name, None)
                linecache.cache.pop(name, None)

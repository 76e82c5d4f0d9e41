"""Record and restore the settings of PyTorch, and filters of warnings, that forward may change.

In eager PyTorch a changed setting stays changed after the call. Compiled code would not change it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import deterministic

from tvmbridge.calls.own_calls import OwnCalls
from tvmbridge.core.kernel_settings import precisions, put_precisions
from tvmbridge.core.torch_private import (
    DisableTorchFunction,
    InferenceMode,
    default_device_context,
    function_mode_count,
    pop_function_mode,
)

_backends = torch.backends


class _Setting(NamedTuple):
    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    of_thread: bool = False  # Whether each thread has its own value.


def _attribute(owner: Any, name: str, label: str) -> _Setting:
    return _Setting(f"{label}.{name}", partial(getattr, owner, name), partial(setattr, owner, name))


def _flushes_denormals() -> bool:
    # PyTorch has no getter. The processor's mode applies to Python's floats as well.
    return sys.float_info.min / 2 == 0


def _default_device() -> Any:
    context = getattr(default_device_context, "device_context", None)
    return None if context is None else context.device


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _put_autocast_nesting(nesting: int) -> None:
    # Autocast keeps casts of weights in a cache until its outermost context exits, which may never
    # happen.
    torch.clear_autocast_cache()
    while _autocast_nesting() < nesting:
        torch.autocast_increment_nesting()
    while _autocast_nesting() > nesting:
        torch.autocast_decrement_nesting()


@contextmanager
def outside_of_autocast_regions() -> Iterator[None]:
    """Make each autocast region inside this context an outermost one.

    The end of an outermost region clears the cache of casts. So casts of a trace are not found by
    operators that run later in an autocast region around the trace.
    """
    nesting = _autocast_nesting()
    _put_autocast_nesting(0)
    try:
        yield
    finally:
        _put_autocast_nesting(nesting)


def _put_grad_mode(mode: bool) -> None:
    # Function modes that record what forward does must not see this call.
    with DisableTorchFunction():
        torch.set_grad_enabled(mode)


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


_SETTINGS = (
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the default device", _default_device, torch.set_default_device, of_thread=True),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads, of_thread=True),
    _Setting("the gradient mode", torch.is_grad_enabled, _put_grad_mode, of_thread=True),
    _Setting("inference mode", torch.is_inference_mode_enabled, lambda _: None, of_thread=True),
    _Setting(
        "deterministic algorithms",
        _deterministic,
        lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    _attribute(deterministic, "fill_uninitialized_memory", "torch.utils.deterministic"),
    _Setting("anomaly detection", _anomaly, lambda v: torch.set_anomaly_enabled(*v)),
    *(
        setting
        for device in ("cpu", "cuda")
        for setting in (
            _Setting(
                f"autocast of {device}",
                partial(torch.is_autocast_enabled, device),
                partial(torch.set_autocast_enabled, device),
                of_thread=True,
            ),
            _Setting(
                f"the dtype of autocast of {device}",
                partial(torch.get_autocast_dtype, device),
                partial(torch.set_autocast_dtype, device),
                of_thread=True,
            ),
        )
    ),
    _Setting(
        "the cache of autocast",
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
        of_thread=True,
    ),
    _Setting("the nesting of autocast", _autocast_nesting, _put_autocast_nesting, of_thread=True),
    _Setting("the precision of float32 products", precisions, put_precisions),
    _Setting(
        "the flushing of denormals", _flushes_denormals, torch.set_flush_denormal, of_thread=True
    ),
    _Setting("warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
    *(
        _Setting(f"scaled_dot_product_attention by {kind}", enabled, put)
        for kind, enabled, put in (
            ("flash", _backends.cuda.flash_sdp_enabled, _backends.cuda.enable_flash_sdp),
            ("math", _backends.cuda.math_sdp_enabled, _backends.cuda.enable_math_sdp),
            (
                "mem_efficient",
                _backends.cuda.mem_efficient_sdp_enabled,
                _backends.cuda.enable_mem_efficient_sdp,
            ),
        )
    ),
    _Setting(
        "torch.backends.mha's fast path",
        _backends.mha.get_fastpath_enabled,
        _backends.mha.set_fastpath_enabled,
    ),
    *(
        _attribute(_backends.cudnn, name, "torch.backends.cudnn")
        for name in ("enabled", "benchmark", "deterministic")
    ),
    _attribute(_backends.mkldnn, "enabled", "torch.backends.mkldnn"),
    _attribute(_backends.opt_einsum, "enabled", "torch.backends.opt_einsum"),
)


def settings_now() -> dict[str, str]:
    """Return PyTorch's settings in this thread as texts, by name."""
    return {setting.name: repr(setting.get()) for setting in _SETTINGS}


class Settings:
    """PyTorch's settings in this thread at the time of construction.

    Args:
        may_set: returns whether this thread may have changed a setting that all threads share.
            None: it may have only if no other thread runs Python.
    """

    def __init__(self, may_set: Callable[[], bool] | None = None) -> None:
        self._may_set = may_set or OwnCalls().may_set
        self._values = [setting.get() for setting in _SETTINGS]
        self._modes = function_mode_count()

    def changed(self) -> list[str]:
        """Return the names of the settings that have changed."""
        found = [setting.name for setting, _ in self._changed()]
        if not found and function_mode_count() != self._modes:
            found.append("a function mode that it entered")
        return found

    def restore(self) -> None:
        """Restore the settings that have changed, and leave function modes entered since."""
        for setting, value in self._changed():
            setting.put(value)
        while function_mode_count() > self._modes:
            pop_function_mode()

    def _changed(self) -> list[tuple[_Setting, Any]]:
        """Return the settings that this thread has changed, with their former values."""
        pairs = list(zip(_SETTINGS, self._values, strict=True))
        changed = [(setting, value) for setting, value in pairs if setting.get() != value]
        shared = any(not setting.of_thread for setting, _ in changed) and not self._may_set()
        return [pair for pair in changed if pair[0].of_thread or not shared]


@contextmanager
def settings_kept(may_set: Callable[[], bool] | None = None) -> Iterator[Settings]:
    """Restore PyTorch's settings on exit, and yield the record of their values at entry.

    Settings that all threads share are restored only if ``may_set()`` is true for this thread.
    """
    settings = Settings(may_set)
    try:
        # An inference mode that is entered inside and never left ends with this one. Entering this
        # one changes the gradient mode, which is therefore set again.
        infers, records = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with InferenceMode(infers):
            _put_grad_mode(records)
            yield settings
    finally:
        settings.restore()


@contextmanager
def warning_filters_kept(own: OwnCalls) -> Iterator[Callable[[], bool]]:
    """Restore Python's filters of warnings on exit, if forward has changed them.

    Filters that imports within the context add stay, unless forward changes the filters too.

    Args:
        own: the calls of forward, which runs within the context.

    Yields:
        a function that returns whether the filters of forward are in force.
    """
    before = list(warnings.filters)

    def changed() -> bool:
        return own.sets_filters and list(warnings.filters) != before

    try:
        yield changed
    finally:
        if changed():
            warnings.filters = before
            with warnings.catch_warnings():  # Makes Python forget what the filters have decided.
                pass

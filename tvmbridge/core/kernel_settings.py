"""PyTorch's settings that influence its kernels, read in one place without ever raising.

PyTorch has two interfaces for the precision of float32 products. The getters of the older interface
raise RuntimeError once the newer one (``torch.backends.*.fp32_precision``) was used. This module
therefore reads the newer one. A setting that the installed PyTorch does not have is None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch.utils import deterministic

from tvmbridge.core.torch_private import fp32_precision, set_cudnn_enabled

# Pairs (library, reduced precision of its float32 matrix products).
Reduced: TypeAlias = tuple[tuple[str, str], ...]

# Public name of a precision -> PyTorch's (backend, kind of operator). A parent comes before its
# children; its value holds for all children that are not set themselves.
_PRECISIONS = {
    "fp32_precision": ("generic", "all"),
    "cuda.matmul.fp32_precision": ("cuda", "matmul"),
    "cudnn.fp32_precision": ("cuda", "all"),
    "cudnn.conv.fp32_precision": ("cuda", "conv"),
    "cudnn.rnn.fp32_precision": ("cuda", "rnn"),
    "mkldnn.fp32_precision": ("mkldnn", "all"),
    "mkldnn.matmul.fp32_precision": ("mkldnn", "matmul"),
    "mkldnn.conv.fp32_precision": ("mkldnn", "conv"),
    "mkldnn.rnn.fp32_precision": ("mkldnn", "rnn"),
}
_FLAGS = (
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "mkldnn.enabled",
    "mkldnn.deterministic",
)
_CUDNN = tuple(name for name in _FLAGS if name.startswith("cudnn"))
_PRODUCTS = {"CUDA": "cuda.matmul.fp32_precision", "oneDNN": "mkldnn.matmul.fp32_precision"}
_FULL = ("none", "ieee")
_GETTERS = {name: attrgetter(name) for name in _FLAGS}
_FUNCTIONS: Mapping[str, Callable[[], Any]] = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic warns": torch.is_deterministic_algorithms_warn_only_enabled,
    "fills uninitialized memory": lambda: deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "attention off": lambda: list(attention_switched_off()),
    # PyTorch has no getter. It is a mode of the processor, which Python's floats follow as well.
    "flushes denormals": lambda: sys.float_info.min / 2 == 0,
}


def _flag(name: str) -> Any:
    try:
        return _GETTERS[name](torch.backends)
    except (AttributeError, RuntimeError):
        return None


def _precision(name: str) -> str | None:
    try:
        precision: str | None = fp32_precision(*_PRECISIONS[name])
        return precision
    except RuntimeError:  # This PyTorch has no such backend or operator.
        return None


def kernel_settings() -> dict[str, Any]:
    """Return all settings by name, with values that JSON can represent."""
    return {
        # "none" is the same as "ieee", which PyTorch's older function sets.
        **{name: None if (p := _precision(name)) in _FULL else p for name in _PRECISIONS},
        **{name: _flag(name) for name in _FLAGS},
        **{name: get() for name, get in _FUNCTIONS.items()},
    }


def gpu_settings() -> tuple[Any, ...]:
    """Return the settings by which cuBLAS and cuDNN choose kernels; read at each call on a GPU."""
    precisions = [_precision(name) for name in _PRECISIONS if name.startswith("cud")]
    return (*precisions, *map(_flag, _CUDNN))


def precision_reader(device: str) -> Callable[[], str | None]:
    """Return a function that reads the precision of float32 products on a type of device."""
    return partial(_precision, _PRODUCTS["CUDA" if device == "cuda" else "oneDNN"])


def reduced_precisions() -> Reduced:
    """Return each library whose float32 products have a reduced precision, with the precision."""
    found = ((library, _precision(name) or "none") for library, name in _PRODUCTS.items())
    return tuple((library, precision) for library, precision in found if precision not in _FULL)


def precisions() -> tuple[Any, ...]:
    """Return all libraries' precisions of float32 products, convolutions and recurrent layers."""
    return tuple(map(_precision, _PRECISIONS))


def put_precisions(values: tuple[Any, ...]) -> None:
    """Restore the precisions in ``values``, which :func:`precisions` returned."""
    for name, value in zip(_PRECISIONS, values, strict=True):
        if value is not None and _precision(name) != value:
            owner, _, attribute = name.rpartition(".")
            holder = attrgetter(owner)(torch.backends) if owner else torch.backends
            setattr(holder, attribute, value)


@contextmanager
def cudnn_switched_off() -> Iterator[None]:
    """Turn cuDNN off within this context, without changing any other setting.

    ``torch.backends.cudnn.flags`` also writes the precision, and raises if convolutions and
    recurrent layers have different precisions.
    """
    before = torch.backends.cudnn.enabled
    set_cudnn_enabled(False)
    try:
        yield
    finally:
        set_cudnn_enabled(before)


SwitchedOff: TypeAlias = tuple[str, ...]

_cuda = torch.backends.cuda
_ENABLED: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("flash", _cuda.flash_sdp_enabled),
    ("efficient", _cuda.mem_efficient_sdp_enabled),
    ("math", _cuda.math_sdp_enabled),
    ("cudnn", _cuda.cudnn_sdp_enabled),
)


def attention_switched_off() -> SwitchedOff:
    """Return the names of attention kernels that are switched off; code is compiled for them."""
    return tuple(name for name, enabled in _ENABLED if not enabled())

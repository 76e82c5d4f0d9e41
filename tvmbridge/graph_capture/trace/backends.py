"""Switch off PyTorch's kernel libraries during a trace, without changing other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.kernel_settings import cudnn_switched_off
from tvmbridge.core.torch_private import export_trace, mkldnn_enabled, set_mkldnn_enabled


@contextmanager
def only_switched_off() -> Iterator[None]:
    """Let torch.export switch off oneDNN, NNPACK and cuDNN without changing other settings.

    This applies to the current thread within the context. PyTorch's own functions for the switch
    also write the precision of float32 products. PyTorch raises if that precision was set by
    ``torch.backends.*.fp32_precision``.
    """
    with patched_here(export_trace(), "_ignore_backend_decomps", _switched_off):
        yield


def _switched_off(genuine: Callable[..., Any]) -> AbstractContextManager[None]:
    return _off()


@contextmanager
def _off() -> Iterator[None]:
    before = mkldnn_enabled()
    set_mkldnn_enabled(False)
    (nnpack,) = torch.backends.nnpack.set_flags(False)
    try:
        with cudnn_switched_off():
            yield
    finally:
        torch.backends.nnpack.set_flags(nnpack)
        set_mkldnn_enabled(before)

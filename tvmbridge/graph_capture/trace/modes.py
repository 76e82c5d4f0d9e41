"""Refuse a forward that enters a dispatch mode of the user.

torch.export records operators above the modes of ``__torch_dispatch__``, so in inference compiled
code would run without what such a mode does.
"""

from __future__ import annotations

from typing import Any

from tvmbridge.calls.patches import patches
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import TorchDispatchMode

_OWN = ("torch.", "tvmbridge.")


@patches(TorchDispatchMode, "__enter__")
def _enter(genuine: Any, mode: TorchDispatchMode) -> Any:
    kind = type(mode)
    if not f"{kind.__module__}.".startswith(_OWN):
        raise CaptureError(
            f"forward enters the dispatch mode {kind.__name__}, which compiled code would run "
            "without: enter it around the call, which then runs in eager PyTorch"
        )
    return genuine(mode)

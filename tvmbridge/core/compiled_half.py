"""Compiled halves: modules of C++ that are built for one PyTorch, where they could be built."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def compiled_half(name: str) -> Any:
    """The module of this name; None where it could not be built, or was for another PyTorch."""
    try:
        module: Any = importlib.import_module(name)
    except ImportError:
        return None
    same = torch.__version__.split("+")[0] == module.TORCH_VERSION
    return module if same else None

"""What the bridge knows of other libraries; none of them is imported, or needed, for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

_COLLECTOR = "transformers.utils.output_capturing"
# Modules whose globals are books about models, and no part of what these compute.
KEEPS_BOOKS = "transformers.utils."
# Its models skip checks where they are compiled, and compute the same.
SAME_WHEN_COMPILED = "transformers."
# Attributes by which a library remembers that it has installed such hooks.
BOOKKEEPING = frozenset({"_output_capturing_hooks_installed"})


def register_caches(module: nn.Module) -> None:
    """Let PyTorch see into the caches of a transformers model: their classes become pytrees.

    Without effect for other modules, and where the library is too old to do it itself.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    for model in module.modules():
        if isinstance(model, library.PreTrainedModel):
            try:
                exporter = importlib.import_module("transformers.exporters.exporter_dynamo")
            except ImportError:
                return
            exporter.register_cache_pytrees_for_model(model)


def acts(hooks: Iterable[Any]) -> bool:
    """Whether any of a module's hooks does something in the present context.

    transformers installs hooks, for good, the first time that hidden states or attentions are
    asked for. They do nothing unless a model that is being called collects what they see; where
    the collecting model is the captured one, the captured graph has all of it.
    """
    for hook in hooks:
        if getattr(hook, "__module__", None) != _COLLECTOR:
            return True
        collector = getattr(sys.modules.get(_COLLECTOR), "_active_collector", None)
        if collector is None or collector.get() is not None:
            return True
    return False
